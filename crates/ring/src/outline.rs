//! What a rank would do, worked out by one process and without messages.
//!
//! Ranks work out what they want by themselves and tell each other. Here one process works out
//! both sides, with the same functions: so an [`Outline`] is the real schedule, and its bytes are
//! those that a ring receives. Only what a rank takes part in is worked out: its own wants, what
//! others want of it, and how the owners of its keys deal them out.
//!
//! How an owner deals depends on what *all* ranks want of it. Mostly a few of them decide (once
//! many ranks want most of its tokens, more can't change that), so that ranks are asked in turn
//! and no longer than needed.

use longspan::{Pattern, Positions};
use longspan_pattern::Sight;
use rustc_hash::FxHashMap;
use std::ops::ControlFlow;

use crate::deal::{self, Deal};
use crate::error::Result;
use crate::load::{self, Work, pairs_seen};
use crate::problem::Problem;
use crate::schedule::{About, Known, Message, Schedule, Step, Way};
use crate::tokens::{self, Tokens};
use crate::want::{self, Want};

/// Outlines of the ranks of one problem.
///
/// ```
/// use longspan::Pattern;
/// use longspan_ring::{Outlines, Problem, Shards};
///
/// let window: Pattern = "causal & window(1000, 0)".parse()?;
/// let shards = Shards::contiguous(1 << 30, 4_096, 64)?;
/// let problem = Problem::new(window, shards).heads(8, 2).dims(128, 128);
/// let outline = Outlines::new(&problem)?.rank(2_000)?;
/// // One neighbour, a thousand keys and values of two heads.
/// let hop = outline.forward.iter().find(|stage| !stage.receives.is_empty()).unwrap();
/// assert_eq!(hop.receives, [(1_999, 1_000 * 2 * (128 + 128) * 4)]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Outlines<'a> {
    problem: &'a Problem,
    /// Sees what any head sees.
    pattern: Pattern,
    sight: Sight,
    /// Patterns of heads, and how many have each.
    patterns: Vec<(Pattern, Sight, u64)>,
    /// How owners deal, where not all of it goes directly.
    deals: FxHashMap<usize, Option<Deal>>,
}

/// What one rank sends, receives and computes in both passes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outline {
    /// Which rank.
    pub rank: usize,
    /// Tokens that it holds.
    pub tokens: u64,
    /// The forward pass; its last stage has no messages.
    pub forward: Vec<Stage>,
    /// The backward pass, likewise.
    pub backward: Vec<Stage>,
}

/// Messages that travel at the same time, and what is computed meanwhile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// The step, which both ends of a message know; ranks go through theirs in ascending order.
    pub label: u32,
    /// Ranks and the bytes that go to each, headers left out; at most so many, where numbers
    /// decide how they travel.
    pub sends: Vec<(usize, u64)>,
    /// Ranks and the bytes that come from each.
    pub receives: Vec<(usize, u64)>,
    /// What is computed before they are waited for.
    pub work: Work,
}

impl Stage {
    /// Bytes that come.
    pub fn received(&self) -> u64 {
        self.receives.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes that go.
    pub fn sent(&self) -> u64 {
        self.sends.iter().map(|(_, bytes)| bytes).sum()
    }
}

impl<'a> Outlines<'a> {
    /// Of the ranks of a problem.
    pub fn new(problem: &'a Problem) -> Result<Self> {
        let pattern = want::any_head(&problem.pattern, problem.heads)?;
        let patterns = load::distinct(&problem.pattern, problem.heads)?;
        let ready =
            |(pattern, times): (&Pattern, u64)| (pattern.clone(), Sight::new(pattern), times);
        let patterns = patterns.into_iter().map(ready).collect();
        let sight = Sight::new(&pattern);
        Ok(Outlines { problem, pattern, sight, patterns, deals: FxHashMap::default() })
    }

    /// What a rank does.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn rank(&mut self, rank: usize) -> Result<Outline> {
        let problem = self.problem;
        let (shards, ranks) = (&problem.shards, problem.shards.ranks());
        let held = shards.rank(rank);
        let wants = (0..ranks).map(|owner| self.want(rank, owner)).collect::<Result<Vec<_>>>()?;
        let asked = (0..ranks).map(|asking| self.want(asking, rank)).collect::<Result<Vec<_>>>()?;
        let (wanted, guests): (Vec<_>, Vec<_>) =
            asked.into_iter().map(|want| (want.keys, want.guests)).unzip();
        let deal = Deal::of(problem, rank, wanted);
        let mut dealt = Vec::with_capacity(ranks);
        for (owner, want) in wants.iter().enumerate() {
            let none = want.keys.is_empty();
            dealt.push(match if none { None } else { self.deal(owner)? } {
                None => (want.keys.clone(), Vec::new()),
                Some(deal) => {
                    let mine = deal.trees.iter().filter(|tree| tree.place(rank).is_some());
                    (deal.direct[rank].clone(), mine.cloned().collect())
                }
            });
        }
        let known = Known { rank, wants: &wants, dealt: &dealt, deal: &deal, guests: &guests };
        let schedule = Schedule::new(problem, &known);

        let mut own = Vec::with_capacity(schedule.own.len());
        for range in &schedule.own {
            let keys = Tokens::range(range.start as i64, range.len() as u64)?;
            own.push(self.work(held, &tokens::stand(held, &keys))?);
        }
        let mut arrivals = Vec::with_capacity(schedule.arrivals.len());
        for arrival in &schedule.arrivals {
            let stay = arrival.stay.as_ref().map(|stay| tokens::stand(held, stay));
            arrivals.push(self.work(stay.as_ref().unwrap_or(held), &arrival.positions)?);
        }
        let mut hostings = Vec::with_capacity(schedule.hostings.len());
        for hosting in &schedule.hostings {
            hostings.push(self.work(&hosting.positions, held)?);
        }
        let stages = |steps: &[Step]| stages(steps, &own, &arrivals, &hostings);
        let (forward, backward) = (stages(&schedule.forward), stages(&schedule.backward));
        Ok(Outline { rank, tokens: held.len(), forward, backward })
    }

    /// Pairs that a rank's own queries see, of all heads and one batch entry. Of more than `rows`
    /// blocks of 64 queries only so many are looked at.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn pairs(&self, rank: usize, rows: u64) -> Result<u128> {
        let shards = &self.problem.shards;
        let mut sum = 0;
        for (pattern, _, times) in &self.patterns {
            let pairs = pairs_seen(pattern, shards.tokens(), shards.rank(rank), rows)?;
            sum += pairs * u128::from(*times);
        }
        Ok(sum)
    }

    fn want(&mut self, asking: usize, owner: usize) -> Result<Want> {
        match asking == owner {
            true => Ok(Want::default()),
            false => {
                let go_on = &mut || ControlFlow::Continue(());
                Want::of(self.problem, &self.pattern, &mut self.sight, asking, owner, go_on)
            }
        }
    }

    fn work(&mut self, queries: &Positions, keys: &Positions) -> Result<Work> {
        load::work(&mut self.patterns, self.problem.shards.tokens(), queries, keys)
    }

    /// How an owner deals; nothing where all goes directly.
    fn deal(&mut self, owner: usize) -> Result<Option<&Deal>> {
        if !self.deals.contains_key(&owner) {
            let deal = self.make_deal(owner)?;
            self.deals.insert(owner, deal);
        }
        Ok(self.deals[&owner].as_ref())
    }

    fn make_deal(&mut self, owner: usize) -> Result<Option<Deal>> {
        let (ranks, held) = (self.problem.shards.ranks(), self.problem.shards.rank(owner).len());
        let mut wanted = vec![Tokens::default(); ranks];
        let mut askers = 0_u32;
        for away in 1..ranks {
            let asking = (owner + away) % ranks;
            let keys = self.want(asking, owner)?.keys;
            if keys.is_empty() {
                continue;
            }
            wanted[asking] = keys;
            askers += 1;
            if askers.is_power_of_two() && deal::is_most(deal::wanted_by_many(&wanted), held) {
                return Ok(None);
            }
        }
        let deal = Deal::of(self.problem, owner, wanted);
        Ok((!deal.trees.is_empty()).then_some(deal))
    }
}

/// Steps with what is computed in each: what the one before had ready.
fn stages(steps: &[Step], own: &[Work], arrivals: &[Work], hostings: &[Work]) -> Vec<Stage> {
    let list = |messages: &[Message]| messages.iter().map(|m| (m.peer, m.bytes())).collect();
    let mut due = Work::default();
    let mut stages = Vec::with_capacity(steps.len() + 1);
    for Step { label, sends, receives, work } in steps {
        let meanwhile = std::mem::take(&mut due);
        let (sends, receives) = (list(sends), list(receives));
        stages.push(Stage { label: *label, sends, receives, work: meanwhile });
        for part in work {
            match (part.about, part.way) {
                (About::Own(number), _) => due += own[number],
                (About::Arrival(arrival), Way::Out) => due += arrivals[arrival],
                (About::Hosting(hosting), Way::Out) => due += hostings[hosting],
                _ => {}
            }
        }
    }
    stages.push(Stage { label: u32::MAX, sends: Vec::new(), receives: Vec::new(), work: due });
    stages
}
