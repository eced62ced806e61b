//! Which query heads a call has, and which key head each attends to.

use longspan_pattern::residues::Steps;

/// Query heads of a call, and the key head that each attends to.
///
/// A call over received keys may have the keys of some heads only: the key head of a query head is
/// then another one in the key tensor than in the whole of it.
///
/// ```
/// use longspan::HeadMap;
///
/// // Eight query heads on two key heads, of which the key tensor has the second.
/// let map = HeadMap::of_key_heads(8, 2, [1]);
/// assert_eq!((map.heads(), map.key_heads()), (8, 1));
/// assert_eq!(map.pairs().collect::<Vec<_>>(), [(4, 0), (5, 0), (6, 0), (7, 0)]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadMap {
    heads: usize,
    key_heads: usize,
    /// Ascending.
    pairs: Vec<(usize, usize)>,
}

impl HeadMap {
    /// All of `heads` query heads, on all of `key_heads` key heads.
    pub fn all(heads: usize, key_heads: usize) -> Self {
        Self::of_key_heads(heads, key_heads, 0..key_heads)
    }

    /// The query heads of some of `key_heads` key heads, ascending; the key tensor has only those.
    pub fn of_key_heads(
        heads: usize,
        key_heads: usize,
        chosen: impl IntoIterator<Item = usize>,
    ) -> Self {
        let group = heads.checked_div(key_heads).unwrap_or(0);
        let mut pairs = Vec::new();
        let mut count = 0;
        for (index, key_head) in chosen.into_iter().enumerate() {
            pairs.extend((key_head * group..(key_head + 1) * group).map(|head| (head, index)));
            count = index + 1;
        }
        HeadMap { heads, key_heads: count, pairs }
    }

    /// Of these, only some query heads; the tensors have all.
    ///
    /// ```
    /// let map = longspan::HeadMap::all(8, 2).of_heads(&[1, 5]);
    /// assert_eq!((map.heads(), map.key_heads()), (8, 2));
    /// assert_eq!(map.pairs().collect::<Vec<_>>(), [(1, 0), (5, 1)]);
    /// ```
    #[must_use]
    pub fn of_heads(&self, chosen: &[usize]) -> Self {
        let pairs = self.pairs().filter(|(head, _)| chosen.contains(head)).collect();
        HeadMap { pairs, ..*self }
    }

    /// Heads of the query tensor.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Heads of the key tensor.
    pub fn key_heads(&self) -> usize {
        self.key_heads
    }

    /// Query heads, ascending, and the key head of each.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.pairs.iter().copied()
    }

    /// The query heads that fulfil a condition, in groups that a call can have: of both tensors
    /// every so many heads, and as many query heads for each key head.
    pub(crate) fn calls(&self, has: impl Fn(usize) -> bool) -> Vec<(Steps, Steps)> {
        let pairs: Vec<_> = self.pairs().filter(|(head, _)| has(*head)).collect();
        let groups: Vec<_> = pairs.chunk_by(|a, b| a.1 == b.1).collect();
        let one = |group: &[(usize, usize)]| {
            let key = Steps { first: group[0].1, step: 1, count: 1 };
            steps(group.iter().map(|pair| pair.0)).map(|heads| (heads, key))
        };
        let even = groups.windows(2).all(|pair| pair[0].len() == pair[1].len());
        let heads = steps(pairs.iter().map(|pair| pair.0));
        let key_heads = steps(groups.iter().map(|group| group[0].1));
        if let (true, Some(heads), Some(key_heads)) = (even, heads, key_heads) {
            return vec![(heads, key_heads)];
        }
        let singles = |group: &&[(usize, usize)]| match one(group) {
            Some(call) => vec![call],
            None => group.chunks(1).filter_map(one).collect(),
        };
        groups.iter().flat_map(singles).collect()
    }
}

/// Indices as steps, where there are any and all have the same distance.
fn steps(mut indices: impl Iterator<Item = usize>) -> Option<Steps> {
    let first = indices.next()?;
    let mut steps = Steps { first, step: 1, count: 1 };
    for index in indices {
        if steps.count == 1 {
            steps.step = index - first;
        }
        if index != first + steps.step * steps.count {
            return None;
        }
        steps.count += 1;
    }
    Some(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_go_together_where_a_call_can_have_them() {
        let steps = |first, step, count| Steps { first, step, count };
        let calls = |map: &HeadMap, rate: usize, offset: usize| {
            map.calls(move |head| head % rate == offset)
        };
        // Four to one: two of each group; every fourth is one of each.
        let map = HeadMap::all(8, 2);
        assert_eq!(calls(&map, 1, 0), [(steps(0, 1, 8), steps(0, 1, 2))]);
        assert_eq!(calls(&map, 2, 1), [(steps(1, 2, 4), steps(0, 1, 2))]);
        assert_eq!(calls(&map, 4, 3), [(steps(3, 4, 2), steps(0, 1, 2))]);
        // Heads 0, 3 and 6: two of the first group, one of the second.
        let apart = [(steps(0, 3, 2), steps(0, 1, 1)), (steps(6, 1, 1), steps(1, 1, 1))];
        assert_eq!(calls(&map, 3, 0), apart);
        // Key heads 1 and 3 of four, which are the only ones of their tensor.
        let map = HeadMap::of_key_heads(8, 4, [1, 3]);
        let apart = [(steps(2, 1, 2), steps(0, 1, 1)), (steps(6, 1, 2), steps(1, 1, 1))];
        assert_eq!(calls(&map, 1, 0), apart);
        assert_eq!(calls(&map, 2, 1), [(steps(3, 4, 2), steps(0, 1, 2))]);
        assert!(calls(&map, 16, 15).is_empty());
    }
}
