//! Communication plans of any rank, computed by one process without messages. For `longspan plan`.
//!
//! Ranks compute their demands and exchange them. Here one process computes both sides of every pair
//! that a rank takes part in, with the same functions: a [`CommunicationPlan`] is the real schedule,
//! and its bytes are those that a ring receives.
//!
//! The send plan of an owner depends on the demands of *all* ranks. Mostly a few of them decide (once
//! many ranks need most of its tokens, further ranks cannot change that), so demands are computed only
//! until the result is known.

use longspan::{DilatedWork, HeadMap, Hook, Pattern, Positions};
use longspan_pattern::PatternCoverage;
use rustc_hash::FxHashMap;

use crate::demand::Demands;
use crate::error::Result;
use crate::load::{self, Work};
use crate::problem::Problem;
use crate::schedule::{Leg, Message, Payload, Schedule, ScheduleInputs, Step};
use crate::send_plan::{self, SendPlan};
use crate::sparsity::{Band, Sparsity, go_on};
use crate::tokens::{self, Tokens};

/// Computes the communication plans of the ranks of one problem.
///
/// ```
/// use longspan::Pattern;
/// use longspan_ring::{CommunicationPlanner, Problem, Shards};
///
/// let window: Pattern = "causal & window(1000, 0)".parse()?;
/// let shards = Shards::contiguous(1 << 30, 4_096, 64)?;
/// let problem = Problem::new(window, shards).heads(8, 2).dims(128, 128);
/// let plan = CommunicationPlanner::new(&problem)?.rank(2_000)?;
/// // One neighbor, a thousand keys and values of two heads.
/// let hop = plan.forward.iter().find(|hop| !hop.receives.is_empty()).unwrap();
/// assert_eq!(hop.receives, [(1_999, 1_000 * 2 * (128 + 128) * 4)]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CommunicationPlanner<'a> {
    problem: &'a Problem,
    demands: Demands<'a>,
    load: Load<'a>,
    /// Send plans by owner and band; none where all tokens are sent directly.
    send_plans: FxHashMap<(usize, usize), Option<SendPlan>>,
}

/// The communication plan of one rank: what it sends, receives and computes in both passes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommunicationPlan {
    /// The rank.
    pub rank: usize,
    /// Tokens of its shard.
    pub tokens: usize,
    /// The forward pass; the last entry has no messages.
    pub forward: Vec<PlannedHop>,
    /// The backward pass, likewise.
    pub backward: Vec<PlannedHop>,
}

/// A hop: concurrent messages, and the computation that overlaps them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedHop {
    /// The step, equal on both ranks of a message; ranks execute their steps in ascending order.
    pub label: u32,
    /// Receiving ranks and bytes, without headers; upper bounds where the wire format's lengths depend
    /// on the values.
    pub sends: Vec<(usize, u64)>,
    /// Sending ranks and bytes, likewise.
    pub receives: Vec<(usize, u64)>,
    /// The work that overlaps the messages.
    pub work: Work,
}

impl PlannedHop {
    /// Bytes received.
    pub fn received(&self) -> u64 {
        self.receives.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes sent.
    pub fn sent(&self) -> u64 {
        self.sends.iter().map(|(_, bytes)| bytes).sum()
    }
}

impl<'a> CommunicationPlanner<'a> {
    /// A planner for a problem.
    pub fn new(problem: &'a Problem) -> Result<Self> {
        let demands = Demands::new(problem)?;
        let load = Load::new(problem, &demands.bands)?;
        Ok(CommunicationPlanner { problem, demands, load, send_plans: FxHashMap::default() })
    }

    /// The plan of a rank.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn rank(&mut self, rank: usize) -> Result<CommunicationPlan> {
        let problem = self.problem;
        let (shards, ranks) = (&problem.shards, problem.shards.ranks());
        let held = shards.rank(rank);
        let bands = self.demands.bands.clone();
        let mut demands = Vec::with_capacity(ranks);
        let mut demanded = vec![Vec::with_capacity(ranks); bands.len()];
        let mut remote = vec![Vec::with_capacity(ranks); bands.len()];
        for other in 0..ranks {
            demands.push(self.demands.of(rank, other, &mut go_on)?);
            for (band, demand) in self.demands.of(other, rank, &mut go_on)?.into_iter().enumerate()
            {
                demanded[band].push(demand.keys);
                remote[band].push(demand.remote_queries);
            }
        }
        let of_band = |demanded| SendPlan::of(problem, rank, demanded);
        let send_plans: Vec<_> = demanded.into_iter().map(of_band).collect();
        let mut received_plans = Vec::with_capacity(ranks);
        for (owner, demands) in demands.iter().enumerate() {
            let mut own = Vec::with_capacity(bands.len());
            for (band, demand) in demands.iter().enumerate() {
                let none = demand.keys.is_empty();
                own.push(match if none { None } else { self.send_plan(owner, band)? } {
                    None => (demand.keys.clone(), Vec::new()),
                    Some(plan) => {
                        let mine = plan.trees.iter().filter(|tree| tree.node(rank).is_some());
                        (plan.direct[rank].clone(), mine.cloned().collect())
                    }
                });
            }
            received_plans.push(own);
        }
        let inputs = ScheduleInputs {
            rank,
            bands: &bands,
            demands: &demands,
            received_plans: &received_plans,
            send_plans: &send_plans,
            remote_queries: &remote,
        };
        let schedule = Schedule::new(problem, &inputs);

        let load = &mut self.load;
        let mut local_keys = Vec::with_capacity(schedule.local_keys.len());
        for range in &schedule.local_keys {
            let keys = Tokens::range(range.start as i64, range.len())?;
            local_keys.push(load.of_all(held, &tokens::positions_of(held, &keys))?);
        }
        let mut received_keys = Vec::with_capacity(schedule.received_keys.len());
        for keys in &schedule.received_keys {
            let queries = keys.queries.as_ref().map(|some| tokens::positions_of(held, some));
            let queries = queries.as_ref().unwrap_or(held);
            received_keys.push(load.of_band(keys.band, queries, &keys.positions)?);
        }
        let mut remote_queries = Vec::with_capacity(schedule.remote_queries.len());
        for queries in &schedule.remote_queries {
            remote_queries.push(load.of_band(queries.band, &queries.positions, held)?);
        }
        let hops = |steps: &[Step]| hops(steps, &local_keys, &received_keys, &remote_queries);
        let (forward, backward) = (hops(&schedule.forward), hops(&schedule.backward));
        Ok(CommunicationPlan { rank, tokens: held.len(), forward, backward })
    }

    /// Active pairs of a rank's own queries, of all heads and one batch entry. Of more than `rows`
    /// blocks of 64 queries only `rows` are counted and extrapolated.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn pairs(&self, rank: usize, rows: usize) -> Result<u128> {
        let shards = &self.problem.shards;
        load::active_pairs(
            &self.problem.sparsity,
            self.problem.heads,
            shards.tokens(),
            shards.rank(rank),
            rows,
        )
    }

    /// The send plan of an owner; none where all tokens are sent directly.
    fn send_plan(&mut self, owner: usize, band: usize) -> Result<Option<&SendPlan>> {
        let key = (owner, band);
        if !self.send_plans.contains_key(&key) {
            let plan = self.make_send_plan(owner, band)?;
            self.send_plans.insert(key, plan);
        }
        Ok(self.send_plans[&key].as_ref())
    }

    fn make_send_plan(&mut self, owner: usize, band: usize) -> Result<Option<SendPlan>> {
        if !SendPlan::has_trees(self.problem) {
            return Ok(None);
        }
        let (ranks, held) = (self.problem.shards.ranks(), self.problem.shards.rank(owner).len());
        let mut demanded = vec![Tokens::default(); ranks];
        let mut receivers = 0_u32;
        for distance in 1..ranks {
            let rank = (owner + distance) % ranks;
            let keys = self.demands.of_band(band, rank, owner, &mut go_on)?.keys;
            if keys.is_empty() {
                continue;
            }
            demanded[rank] = keys;
            receivers += 1;
            let check = receivers.is_power_of_two();
            if check && send_plan::exceeds_tree_limit(send_plan::count_shared(&demanded), held) {
                return Ok(None);
            }
        }
        let plan = SendPlan::of(self.problem, owner, demanded);
        Ok((!plan.trees.is_empty()).then_some(plan))
    }
}

/// Work of the computations of a problem.
#[derive(Debug)]
struct Load<'a> {
    problem: &'a Problem,
    bands: Vec<Band>,
    /// Distinct patterns of each band, and the number of query heads with each; none for dilated
    /// attention.
    patterns: Vec<Vec<(Pattern, PatternCoverage, u64)>>,
}

impl<'a> Load<'a> {
    fn new(problem: &'a Problem, bands: &[Band]) -> Result<Self> {
        let of_band = |band: &Band| -> Result<Vec<_>> {
            let Sparsity::Patterns(patterns) = &problem.sparsity else { return Ok(Vec::new()) };
            let distinct = load::distinct(patterns, band.heads.iter().copied(), problem.heads)?;
            let with_coverage = |(pattern, times): (Pattern, u64)| {
                let coverage = PatternCoverage::new(&pattern);
                (pattern, coverage, times)
            };
            Ok(distinct.into_iter().map(with_coverage).collect())
        };
        let patterns = bands.iter().map(of_band).collect::<Result<_>>()?;
        Ok(Load { problem, bands: bands.to_vec(), patterns })
    }

    /// All heads of some queries over some keys.
    fn of_all(&mut self, queries: &Positions, keys: &Positions) -> Result<Work> {
        let mut sum = Work::default();
        for band in 0..self.bands.len() {
            sum += self.of_band(band, queries, keys)?;
        }
        Ok(sum)
    }

    /// The heads of a band.
    fn of_band(&mut self, band: usize, queries: &Positions, keys: &Positions) -> Result<Work> {
        let tokens = self.problem.shards.tokens();
        let Sparsity::Dilated(dilated) = &self.problem.sparsity else {
            return load::work(&mut self.patterns[band], tokens, queries, keys);
        };
        // Key heads of a band have equal work.
        let Problem { heads, key_heads, .. } = self.problem;
        let band = &self.bands[band];
        let one = HeadMap::of_key_heads(*heads, *key_heads, [band.key_heads[0]]);
        let DilatedWork { pairs, full_pairs, partial_blocks } =
            dilated.work(tokens, queries, keys, &one, Hook::none())?;
        let mut sum = Work::default();
        sum.add(Work { pairs, full_pairs, partial_blocks }, band.key_heads.len() as u64);
        Ok(sum)
    }
}

/// Steps with the work that overlaps each: what the step before has enabled.
fn hops(steps: &[Step], local: &[Work], received: &[Work], remote: &[Work]) -> Vec<PlannedHop> {
    let list = |messages: &[Message]| messages.iter().map(|m| (m.peer, m.bytes())).collect();
    let mut due = Work::default();
    let mut hops = Vec::with_capacity(steps.len() + 1);
    for Step { label, sends, receives, work } in steps {
        let overlapped = std::mem::take(&mut due);
        let (sends, receives) = (list(sends), list(receives));
        hops.push(PlannedHop { label: *label, sends, receives, work: overlapped });
        for part in work {
            match (part.payload, part.leg) {
                (Payload::LocalKeys(index), _) => due += local[index],
                (Payload::ReceivedKeys(index), Leg::Outbound) => due += received[index],
                (Payload::RemoteQueries(index), Leg::Outbound) => due += remote[index],
                _ => {}
            }
        }
    }
    hops.push(PlannedHop { label: u32::MAX, sends: Vec::new(), receives: Vec::new(), work: due });
    hops
}
