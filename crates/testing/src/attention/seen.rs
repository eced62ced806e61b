//! Which keys each query sees, written out: a list of key numbers per row, ascending.
//!
//! Lists rather than a predicate, so that a sparse problem costs its pairs and not its square, and
//! a rule that many heads share is asked once.

/// The keys that each query of each batch entry and query head may see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    distinct: Vec<Rows>,
    /// The one of batch entry `b` and query head `h` at `b · heads + h`; empty where one is for
    /// all.
    choice: Vec<usize>,
    heads: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Rows {
    Each(Vec<Vec<u32>>),
    /// One list for every query.
    Alike(Vec<u32>),
}

impl Seen {
    /// Every query sees every key.
    pub fn everything(keys: usize) -> Seen {
        let all = (0..keys as u32).collect();
        Seen { distinct: vec![Rows::Alike(all)], choice: vec![], heads: 0 }
    }

    /// The same for all batch entries and heads: `allows(query, key)`.
    pub fn shared(queries: usize, keys: usize, allows: impl Fn(usize, usize) -> bool) -> Seen {
        Seen { distinct: vec![lists(queries, keys, &allows)], choice: vec![], heads: 0 }
    }

    /// One a batch entry and head: `which(batch, head)` numbers the distinct ones from zero and
    /// `allows(number, query, key)` says what they are.
    pub fn each(
        (batch, heads): (usize, usize),
        (queries, keys): (usize, usize),
        which: impl Fn(usize, usize) -> usize,
        allows: impl Fn(usize, usize, usize) -> bool,
    ) -> Seen {
        let choice: Vec<usize> = (0..batch * heads).map(|n| which(n / heads, n % heads)).collect();
        let count = choice.iter().max().map_or(0, |last| last + 1);
        let distinct = (0..count).map(|n| lists(queries, keys, &|i, j| allows(n, i, j))).collect();
        Seen { distinct, choice, heads }
    }

    /// The keys that each query of a head sees, `rows[head][query]`, the same for all batch entries. A
    /// key that stands twice counts twice.
    pub fn listed(batch: usize, rows: Vec<Vec<Vec<u32>>>) -> Seen {
        let heads = rows.len();
        let choice = (0..batch * heads).map(|n| n % heads).collect();
        Seen { distinct: rows.into_iter().map(Rows::Each).collect(), choice, heads }
    }

    /// The same for batch entries that differ: the rows of entry `b` and head `h` at `b · heads + h`.
    pub fn listed_each(rows: Vec<Vec<Vec<u32>>>, heads: usize) -> Seen {
        let choice = (0..rows.len()).collect();
        Seen { distinct: rows.into_iter().map(Rows::Each).collect(), choice, heads }
    }

    /// The keys that a query sees, ascending.
    pub fn keys(&self, batch: usize, head: usize, query: usize) -> &[u32] {
        let number = self.choice.get(batch * self.heads + head).copied().unwrap_or(0);
        match &self.distinct[number] {
            Rows::Each(rows) => &rows[query],
            Rows::Alike(row) => row,
        }
    }

    /// Whether a query sees a key.
    pub fn sees(&self, batch: usize, head: usize, query: usize, key: usize) -> bool {
        self.keys(batch, head, query).binary_search(&(key as u32)).is_ok()
    }
}

fn lists(queries: usize, keys: usize, allows: &dyn Fn(usize, usize) -> bool) -> Rows {
    let row = |i| (0..keys).filter(|&j| allows(i, j)).map(|j| j as u32).collect();
    Rows::Each((0..queries).map(row).collect())
}
