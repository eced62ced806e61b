//! Which blocks of a row are kept, given their masses.

use longspan_pattern::Run;

use super::{CANDIDATES, DENSE_ABOVE, LOST};

/// How many blocks of a row are kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Budget {
    /// The share of the row's mass to reach.
    pub(super) mass: f32,
    /// The least share of the row's mass that a block is kept for.
    pub(super) block_mass: f32,
    pub(super) min_blocks: usize,
    pub(super) max_blocks: usize,
    /// Rows of up to so many blocks keep all.
    pub(super) all_up_to: usize,
}

impl Budget {
    /// The budget of candidates in blocks that are so many times larger.
    pub(super) fn widened(self, factor: usize, all_up_to: usize) -> Self {
        Budget {
            mass: 1.0 - LOST * (1.0 - self.mass),
            block_mass: LOST * self.block_mass,
            min_blocks: self.min_blocks,
            max_blocks: self.max_blocks.saturating_mul(CANDIDATES).div_ceil(factor),
            all_up_to,
        }
    }

    /// The columns to keep, ascending: those of `always` that are in `base`, then the largest masses
    /// until their sum reaches its share or the next is too small. All of them where that is most of
    /// them, or where a mass is not a number.
    pub(super) fn choose(&self, base: &[Run], always: &[Run], masses: &[f32]) -> Vec<u32> {
        let all = || base.iter().flat_map(|run| run.start..run.end());
        let blocks: usize = base.iter().map(|run| run.len as usize).sum();
        if blocks <= self.all_up_to {
            return all().collect();
        }
        let mut always = always.iter().peekable();
        let mut is_always = |column: u32| {
            while always.next_if(|run| run.end() <= column).is_some() {}
            always.peek().is_some_and(|run| run.start <= column)
        };
        let (mut kept, mut others) = (Vec::new(), Vec::new());
        let (mut total, mut sum) = (0.0_f64, 0.0_f64);
        for column in all() {
            let mass = masses[column as usize];
            total += f64::from(mass);
            if is_always(column) {
                sum += f64::from(mass);
                kept.push(column);
            } else {
                // Descending masses, then ascending columns: masses are at least 0, so that their
                // bits are ordered as they are.
                others.push(u64::from(!mass.to_bits()) << 32 | u64::from(column));
            }
        }
        if !total.is_finite() {
            return all().collect();
        }
        let target = f64::from(self.mass) * total;
        let most = self.max_blocks.saturating_sub(kept.len());
        let least = self.min_blocks.saturating_sub(kept.len());
        // Only so many are looked at, which is worth it in long rows.
        if most < others.len() {
            others.select_nth_unstable(most);
            others.truncate(most);
        }
        others.sort_unstable();
        for (number, &other) in others.iter().enumerate() {
            let mass = f64::from(f32::from_bits(!(other >> 32) as u32));
            let enough = sum >= target || mass < f64::from(self.block_mass) * total;
            if number >= least && enough {
                break;
            }
            sum += mass;
            kept.push(other as u32);
        }
        if kept.len() as f64 > DENSE_ABOVE * blocks as f64 && blocks <= self.max_blocks {
            return all().collect();
        }
        kept.sort_unstable();
        kept
    }
}

#[cfg(test)]
mod tests {
    use longspan_pattern::{Layout, Pattern, Shape};

    use super::*;

    fn choose(budget: Budget, always: &str, masses: &[f32]) -> Vec<u32> {
        let shape = Shape::new(64, 64 * masses.len());
        let compile = |pattern: &Pattern| Layout::compile(pattern, &shape).unwrap();
        let (base, always) = (compile(&Pattern::full()), compile(&always.parse().unwrap()));
        budget.choose(base.row(0), always.row(0), masses)
    }

    #[test]
    fn the_smallest_set_that_reaches_its_share() {
        let masses = [0.1, 0.4, 0.1, 0.3, 0.1];
        let budget = |mass| Budget {
            mass,
            block_mass: 0.0,
            min_blocks: 0,
            max_blocks: usize::MAX,
            all_up_to: 0,
        };
        assert_eq!(choose(budget(0.65), "!full", &masses), [1, 3]);
        // Ties go to the lower block.
        assert_eq!(choose(budget(0.75), "!full", &masses), [0, 1, 3]);
        assert_eq!(choose(budget(0.4), "sinks(1)", &masses), [0, 1]);
        assert_eq!(choose(Budget { max_blocks: 1, ..budget(0.9) }, "!full", &masses), [1]);
        assert_eq!(choose(Budget { min_blocks: 3, ..budget(0.1) }, "!full", &masses), [0, 1, 3]);
        assert_eq!(choose(Budget { max_blocks: 1, ..budget(0.9) }, "sinks(65)", &masses), [0, 1]);
        assert_eq!(choose(Budget { block_mass: 0.2, ..budget(0.9) }, "!full", &masses), [1, 3]);
        assert_eq!(
            choose(Budget { all_up_to: 5, ..budget(0.1) }, "!full", &masses),
            [0, 1, 2, 3, 4]
        );
        let unknown = [0.1, f32::NAN, 0.1];
        assert_eq!(choose(budget(0.1), "!full", &unknown), [0, 1, 2]);
    }
}
