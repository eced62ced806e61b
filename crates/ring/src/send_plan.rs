//! Send plan: how an owner's keys reach the ranks that need them, directly or by a broadcast tree.
//! `agreement` and `planner` make it from the demands of all ranks.
//!
//! An owner would send tokens that many ranks need many times. They are broadcast by a binary tree of
//! these ranks, and gradients are reduced along the same tree. This is for few tokens (sinks): where
//! many ranks need most tokens of an owner, as in causal attention, all ranks send about as much as
//! they receive anyway.

use rustc_hash::FxHashMap;

use crate::bytes::{Reader, write_tokens, write_word};
use crate::error::Result;
use crate::problem::{Problem, Reduction};
use crate::sparsity::Sparsity;
use crate::tokens::{self, Tokens};

/// Tokens are broadcast by a tree from this number of receiving ranks on.
const TREE_MIN_RANKS: u32 = 4;

/// Tokens that the same ranks need, and these ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BroadcastTree {
    /// Index among its owner's trees.
    pub(crate) index: u32,
    pub(crate) owner: usize,
    pub(crate) tokens: Tokens,
    /// The owner, then the receiving ranks: nodes `2i + 1` and `2i + 2` receive from node `i`.
    pub(crate) ranks: Vec<usize>,
}

/// What an owner sends to each rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SendPlan {
    /// Tokens that the owner sends itself, by rank.
    pub(crate) direct: Vec<Tokens>,
    pub(crate) trees: Vec<BroadcastTree>,
}

impl SendPlan {
    /// The plan for an owner's tokens that each rank demands. Reproducible reductions use no trees:
    /// every rank receives tokens in the order of the sequence. Neither does dilated attention: the
    /// few tokens of a high rate that many ranks need are different ones of every owner, so that all
    /// ranks send about as much as they receive.
    pub(crate) fn of(problem: &Problem, owner: usize, demanded: Vec<Tokens>) -> Self {
        match Self::has_trees(problem) {
            true => SendPlan::new(owner, problem.shards.rank(owner).len(), demanded),
            false => SendPlan { direct: demanded, trees: Vec::new() },
        }
    }

    /// Whether any plan of a problem may have trees.
    pub(crate) fn has_trees(problem: &Problem) -> bool {
        problem.reduction == Reduction::Overlapped
            && matches!(problem.sparsity, Sparsity::Patterns(_))
    }

    /// The plan for the `held` tokens of `owner`, from those that each rank demands.
    pub(crate) fn new(owner: usize, held: usize, demanded: Vec<Tokens>) -> Self {
        let shared = count_shared(&demanded);
        if shared == 0 || exceeds_tree_limit(shared, held) {
            return SendPlan { direct: demanded, trees: Vec::new() };
        }
        let mut counts = vec![0_u32; held];
        for tokens in &demanded {
            tokens::indices(tokens).for_each(|token| counts[token] += 1);
        }
        let is_shared = |token: &usize| counts[*token] >= TREE_MIN_RANKS;
        let mut receivers: FxHashMap<usize, Vec<usize>> = FxHashMap::default();
        for (rank, tokens) in demanded.iter().enumerate() {
            for token in tokens::indices(tokens).filter(is_shared) {
                receivers.entry(token).or_default().push(rank);
            }
        }
        let mut same: FxHashMap<Vec<usize>, Vec<usize>> = FxHashMap::default();
        for (token, ranks) in receivers {
            same.entry(ranks).or_default().push(token);
        }
        let mut classes: Vec<_> = same.into_iter().collect();
        classes.iter_mut().for_each(|(_, tokens)| tokens.sort_unstable());
        classes.sort_unstable_by_key(|(_, tokens)| tokens[0]);
        let words = held.div_ceil(64);
        let trees = classes.into_iter().enumerate().map(|(index, (ranks, members))| {
            let mut bits = vec![0_u64; words];
            members.iter().for_each(|token| bits[token / 64] |= 1 << (token % 64));
            let ranks = std::iter::once(owner).chain(ranks).collect();
            BroadcastTree { index: index as u32, owner, tokens: tokens::of_bits(&bits), ranks }
        });
        let direct = demanded.iter().map(|tokens| {
            let mut bits = tokens::to_bits(tokens, held);
            for token in tokens::indices(tokens).filter(is_shared) {
                bits[token / 64] &= !(1 << (token % 64));
            }
            tokens::of_bits(&bits)
        });
        SendPlan { direct: direct.collect(), trees: trees.collect() }
    }

    /// The part of the plan that concerns a rank.
    pub(crate) fn encode_for(&self, rank: usize, bytes: &mut Vec<u8>) {
        write_tokens(bytes, &self.direct[rank]);
        let concerned = || self.trees.iter().filter(|tree| tree.ranks.contains(&rank));
        write_word(bytes, concerned().count() as u64);
        for tree in concerned() {
            write_word(bytes, tree.index.into());
            write_tokens(bytes, &tree.tokens);
            write_word(bytes, tree.ranks.len() as u64);
            tree.ranks.iter().for_each(|&rank| write_word(bytes, rank as u64));
        }
    }
}

/// Number of an owner's tokens that at least [`TREE_MIN_RANKS`] ranks demand.
pub(crate) fn count_shared<'a>(demanded: impl IntoIterator<Item = &'a Tokens>) -> usize {
    let mut edges: Vec<(i64, i32)> = Vec::new();
    for progression in demanded.into_iter().flat_map(Tokens::progressions) {
        let (ranges, len) =
            if progression.step == 1 { (1, progression.len) } else { (progression.len, 1) };
        for range in 0..ranges {
            let start = progression.start + (range * progression.step) as i64;
            edges.extend([(start, 1), (start + len as i64, -1)]);
        }
    }
    edges.sort_unstable();
    let (mut shared, mut ranks) = (0, 0);
    for pair in edges.windows(2) {
        ranks += pair[0].1;
        if ranks >= TREE_MIN_RANKS as i32 {
            shared += (pair[1].0 - pair[0].0) as usize;
        }
    }
    shared
}

/// Whether an owner has too many shared tokens for trees. Monotonic: demands of further ranks cannot
/// undo it.
pub(crate) fn exceeds_tree_limit(shared: usize, held: usize) -> bool {
    shared > held.div_ceil(4)
}

/// What a rank receives from an owner: directly, and by trees. The inverse of
/// [`SendPlan::encode_for`].
pub(crate) fn decode(
    owner: usize,
    reader: &mut Reader<'_>,
) -> Result<(Tokens, Vec<BroadcastTree>)> {
    // A rank's message to itself is empty.
    if reader.is_empty() {
        return Ok((Tokens::default(), Vec::new()));
    }
    let direct = reader.tokens()?;
    let mut trees = Vec::new();
    for _ in 0..reader.word()? {
        let index = reader.word()? as u32;
        let tokens = reader.tokens()?;
        let count = reader.word()?;
        let ranks =
            (0..count).map(|_| reader.word().map(|rank| rank as usize)).collect::<Result<_>>()?;
        trees.push(BroadcastTree { index, owner, tokens, ranks });
    }
    Ok((direct, trees))
}

impl BroadcastTree {
    /// The node of a rank.
    pub(crate) fn node(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|&other| other == rank)
    }

    /// The nodes that receive from a node.
    pub(crate) fn children(&self, node: usize) -> impl Iterator<Item = usize> + use<> {
        let end = self.ranks.len();
        [2 * node + 1, 2 * node + 2].into_iter().filter(move |&child| child < end)
    }

    /// The step in which tokens reach a node: one after its parent for the first child, two for the
    /// second.
    pub(crate) fn broadcast_step(&self, node: usize) -> u32 {
        match node {
            0 => 0,
            _ => self.broadcast_step((node - 1) / 2) + 2 - node as u32 % 2,
        }
    }

    /// The step in which a node sends its gradients: two after the last of their inputs arrived.
    pub(crate) fn reduce_step(&self, node: usize) -> u32 {
        let last = self.children(node).map(|child| self.reduce_step(child)).max();
        last.unwrap_or(0).max(self.broadcast_step(node)) + 2
    }
}

#[cfg(test)]
mod tests {
    use longspan::Positions;

    use super::*;

    #[test]
    fn sinks_go_by_tree_and_other_tokens_directly() {
        let demanded = (0..9).map(|rank| match rank {
            0 => Positions::default(),
            1 => Positions::range(0, 100).unwrap(),
            _ => Positions::range(0, 4).unwrap(),
        });
        let plan = SendPlan::new(0, 100, demanded.collect());
        assert_eq!(plan.trees.len(), 1);
        assert_eq!(plan.trees[0].ranks, (0..9).collect::<Vec<_>>());
        assert_eq!(plan.direct[1], Positions::range(4, 96).unwrap());
        assert!(plan.direct[2].is_empty());
        for rank in 1..9 {
            let mut bytes = Vec::new();
            plan.encode_for(rank, &mut bytes);
            let (direct, trees) = decode(0, &mut Reader::new(&bytes)).unwrap();
            assert_eq!((direct, trees), (plan.direct[rank].clone(), plan.trees.clone()));
        }
    }

    #[test]
    fn tokens_that_all_ranks_need_go_directly() {
        let demanded = vec![Positions::range(0, 100).unwrap(); 9];
        let plan = SendPlan::new(0, 100, demanded.clone());
        assert_eq!(plan, SendPlan { direct: demanded, trees: Vec::new() });
    }

    #[test]
    fn shared_tokens_are_counted() {
        let comb = |start, step, len| {
            Positions::new([longspan::Progression { start, step, len }]).unwrap()
        };
        let demanded =
            [comb(0, 1, 50), comb(0, 2, 40), comb(10, 1, 5), comb(3, 1, 30), comb(0, 7, 9)];
        let ranks = |token: usize| {
            demanded.iter().filter(|tokens| tokens::indices(tokens).any(|t| t == token)).count()
        };
        let shared = (0..100).filter(|&token| ranks(token) >= TREE_MIN_RANKS as usize).count();
        assert!(shared > 0);
        assert_eq!(count_shared(&demanded), shared);
        assert_eq!(count_shared(&[]), 0);
    }

    #[test]
    fn nodes_receive_after_their_parent_and_reduce_after_their_children() {
        let ranks = (0..23).collect();
        let tree = BroadcastTree { index: 0, owner: 0, tokens: Positions::default(), ranks };
        for node in 0..23 {
            for child in tree.children(node) {
                assert!(tree.broadcast_step(child) > tree.broadcast_step(node));
                assert!(tree.reduce_step(node) >= tree.reduce_step(child) + 2);
            }
            assert!(tree.reduce_step(node) >= tree.broadcast_step(node) + 2);
        }
        assert!(tree.broadcast_step(22) <= 8);
    }
}
