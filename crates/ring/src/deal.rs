//! How an owner's keys reach the ranks that want them: from itself, or by a tree.
//!
//! Tokens that many ranks want would make their owner send them many times over. They go by a
//! binary tree of the ranks that want them, and gradients come back by the same one, added up on
//! the way. That is for few tokens (sinks): where a rank's tokens are mostly wanted by many, as in
//! causal attention, all ranks send about as much as they receive anyway.

use rustc_hash::FxHashMap;

use crate::bytes::{Reader, write_tokens, write_word};
use crate::error::Result;
use crate::problem::{Fold, Problem};
use crate::tokens::{self, Tokens};

/// Ranks that are many.
const MANY: u32 = 4;

/// Tokens that the same ranks want.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tree {
    /// Which of its owner's.
    pub(crate) number: u32,
    pub(crate) owner: usize,
    pub(crate) tokens: Tokens,
    /// The owner, then the ranks that want them: those at `2i + 1` and `2i + 2` have them from `i`.
    pub(crate) ranks: Vec<usize>,
}

/// What an owner sends to whom.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Deal {
    /// To each rank from the owner itself.
    pub(crate) direct: Vec<Tokens>,
    pub(crate) trees: Vec<Tree>,
}

impl Deal {
    /// How an owner's tokens get to the ranks that want them, by rank: without trees where every
    /// rank takes them in the order in which they stand.
    pub(crate) fn of(problem: &Problem, owner: usize, wanted: Vec<Tokens>) -> Self {
        match problem.fold {
            Fold::Overlapped => Deal::new(owner, problem.shards.rank(owner).len(), wanted),
            Fold::Reproducible => Deal { direct: wanted, trees: Vec::new() },
        }
    }

    /// How the `held` tokens of `owner` get to the ranks that want them, by rank.
    pub(crate) fn new(owner: usize, held: u64, wanted: Vec<Tokens>) -> Self {
        let many = wanted_by_many(&wanted);
        if many == 0 || is_most(many, held) {
            return Deal { direct: wanted, trees: Vec::new() };
        }
        let mut counts = vec![0_u32; held as usize];
        for tokens in &wanted {
            tokens::numbers(tokens).for_each(|token| counts[token] += 1);
        }
        let mut who: FxHashMap<usize, Vec<usize>> = FxHashMap::default();
        for (rank, tokens) in wanted.iter().enumerate() {
            for token in tokens::numbers(tokens).filter(|token| counts[*token] >= MANY) {
                who.entry(token).or_default().push(rank);
            }
        }
        let mut same: FxHashMap<Vec<usize>, Vec<usize>> = FxHashMap::default();
        for (token, ranks) in who {
            same.entry(ranks).or_default().push(token);
        }
        let mut classes: Vec<_> = same.into_iter().collect();
        classes.iter_mut().for_each(|(_, tokens)| tokens.sort_unstable());
        classes.sort_unstable_by_key(|(_, tokens)| tokens[0]);
        let words = (held as usize).div_ceil(64);
        let trees = classes.into_iter().enumerate().map(|(number, (ranks, members))| {
            let mut bits = vec![0_u64; words];
            members.iter().for_each(|token| bits[token / 64] |= 1 << (token % 64));
            let ranks = std::iter::once(owner).chain(ranks).collect();
            Tree { number: number as u32, owner, tokens: tokens::of_bits(&bits), ranks }
        });
        let direct = wanted.iter().map(|tokens| {
            let mut bits = tokens::to_bits(tokens, held);
            for token in tokens::numbers(tokens).filter(|token| counts[*token] >= MANY) {
                bits[token / 64] &= !(1 << (token % 64));
            }
            tokens::of_bits(&bits)
        });
        Deal { direct: direct.collect(), trees: trees.collect() }
    }

    /// What a rank has to know of it.
    pub(crate) fn for_rank(&self, rank: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_tokens(&mut bytes, &self.direct[rank]);
        for tree in self.trees.iter().filter(|tree| tree.ranks.contains(&rank)) {
            write_word(&mut bytes, tree.number.into());
            write_tokens(&mut bytes, &tree.tokens);
            write_word(&mut bytes, tree.ranks.len() as u64);
            tree.ranks.iter().for_each(|&rank| write_word(&mut bytes, rank as u64));
        }
        bytes
    }
}

/// How many of an owner's tokens many ranks want.
pub(crate) fn wanted_by_many<'a>(wanted: impl IntoIterator<Item = &'a Tokens>) -> u64 {
    let mut edges: Vec<(i64, i32)> = Vec::new();
    for piece in wanted.into_iter().flat_map(Tokens::progressions) {
        let (stretches, len) = if piece.step == 1 { (1, piece.len) } else { (piece.len, 1) };
        for stretch in 0..stretches {
            let start = piece.start + (stretch * piece.step) as i64;
            edges.extend([(start, 1), (start + len as i64, -1)]);
        }
    }
    edges.sort_unstable();
    let (mut many, mut ranks) = (0, 0);
    for pair in edges.windows(2) {
        ranks += pair[0].1;
        if ranks >= MANY as i32 {
            many += (pair[1].0 - pair[0].0) as u64;
        }
    }
    many
}

/// Whether so many of an owner's tokens are too many for trees; it stays so when more ranks want
/// some.
pub(crate) fn is_most(many: u64, held: u64) -> bool {
    many > held.div_ceil(4)
}

/// What a rank has from an owner: directly, and by trees. The reverse of [`Deal::for_rank`].
pub(crate) fn read(owner: usize, bytes: &[u8]) -> Result<(Tokens, Vec<Tree>)> {
    let mut reader = Reader::new(bytes);
    if bytes.is_empty() {
        return Ok((Tokens::default(), Vec::new()));
    }
    let direct = reader.tokens()?;
    let mut trees = Vec::new();
    while !reader.is_empty() {
        let number = reader.word()? as u32;
        let tokens = reader.tokens()?;
        let count = reader.word()?;
        let ranks =
            (0..count).map(|_| reader.word().map(|rank| rank as usize)).collect::<Result<_>>()?;
        trees.push(Tree { number, owner, tokens, ranks });
    }
    Ok((direct, trees))
}

impl Tree {
    /// Where a rank stands.
    pub(crate) fn place(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|&other| other == rank)
    }

    /// Who has its tokens from the one at `place`, by place.
    pub(crate) fn children(&self, place: usize) -> impl Iterator<Item = usize> + use<> {
        let end = self.ranks.len();
        [2 * place + 1, 2 * place + 2].into_iter().filter(move |&child| child < end)
    }

    /// At which step tokens reach a place: its parent's first child has them a step after it, the
    /// second two.
    pub(crate) fn step(&self, place: usize) -> u32 {
        match place {
            0 => 0,
            _ => self.step((place - 1) / 2) + 2 - place as u32 % 2,
        }
    }

    /// At which step gradients leave a place: two after the last of what they are made of has
    /// arrived.
    pub(crate) fn back(&self, place: usize) -> u32 {
        let last = self.children(place).map(|child| self.back(child)).max();
        last.unwrap_or(0).max(self.step(place)) + 2
    }
}

#[cfg(test)]
mod tests {
    use longspan::Positions;

    use super::*;

    #[test]
    fn sinks_go_by_a_tree_and_the_rest_directly() {
        let wanted = (0..9).map(|rank| match rank {
            0 => Positions::default(),
            1 => Positions::range(0, 100).unwrap(),
            _ => Positions::range(0, 4).unwrap(),
        });
        let deal = Deal::new(0, 100, wanted.collect());
        assert_eq!(deal.trees.len(), 1);
        assert_eq!(deal.trees[0].ranks, (0..9).collect::<Vec<_>>());
        assert_eq!(deal.direct[1], Positions::range(4, 96).unwrap());
        assert!(deal.direct[2].is_empty());
        for rank in 1..9 {
            let (direct, trees) = read(0, &deal.for_rank(rank)).unwrap();
            assert_eq!((direct, trees), (deal.direct[rank].clone(), deal.trees.clone()));
        }
    }

    #[test]
    fn what_everybody_wants_goes_directly() {
        let wanted = vec![Positions::range(0, 100).unwrap(); 9];
        let deal = Deal::new(0, 100, wanted.clone());
        assert_eq!(deal, Deal { direct: wanted, trees: Vec::new() });
    }

    #[test]
    fn tokens_that_many_want_are_counted() {
        let comb = |start, step, len| {
            Positions::new([longspan::Progression { start, step, len }]).unwrap()
        };
        let wanted =
            [comb(0, 1, 50), comb(0, 2, 40), comb(10, 1, 5), comb(3, 1, 30), comb(0, 7, 9)];
        let counts =
            |token: usize| wanted.iter().filter(|w| tokens::numbers(w).any(|t| t == token)).count();
        let many = (0..100).filter(|&token| counts(token) >= MANY as usize).count() as u64;
        assert!(many > 0);
        assert_eq!(wanted_by_many(&wanted), many);
        assert_eq!(wanted_by_many(&[]), 0);
    }

    #[test]
    fn a_place_is_reached_after_its_parent_and_left_after_its_children() {
        let ranks = (0..23).collect();
        let tree = Tree { number: 0, owner: 0, tokens: Positions::default(), ranks };
        for place in 0..23 {
            for child in tree.children(place) {
                assert!(tree.step(child) > tree.step(place));
                assert!(tree.back(place) >= tree.back(child) + 2);
            }
            assert!(tree.back(place) >= tree.step(place) + 2);
        }
        assert!(tree.step(22) <= 8);
    }
}
