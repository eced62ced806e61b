//! Agreement between ranks: equal problems, and from demands and send plans to this rank's schedule.
//! `ring` calls it during setup.
//!
//! ```text
//! allgather   digests of the problem        equal on every rank
//! all-to-all  demands                       which of a rank's keys each other rank needs
//! all-to-all  send plans                    how they get there
//! ```

use std::collections::BTreeMap;

use longspan_pattern::PatternCoverage;

use crate::bytes::{Reader, write_tokens};
use crate::communicator::Communicator;
use crate::demand::{self, Demand};
use crate::error::{Error, Result};
use crate::problem::{Field, Problem, Reduction};
use crate::schedule::{Schedule, ScheduleInputs, TILE};
use crate::send_plan::{self, SendPlan};
use crate::tokens::Tokens;

/// First steps of the exchanges; each takes fewer steps than lie between them.
const VALUES: u32 = 1 << 19;
const DEMANDS: u32 = 1 << 20;
const SEND_PLANS: u32 = 1 << 21;

/// Bytes of an argument's value in a [`Error::Mismatch`].
const VALUE_LEN: usize = 160;

/// Checks that all ranks compute the same problem, and makes this rank's schedule.
pub(crate) fn schedule(comm: &mut Communicator<'_>, problem: &Problem) -> Result<Schedule> {
    let (rank, ranks) = (comm.rank(), comm.size());
    check_equal(comm, problem)?;
    if problem.shards.ranks() != ranks {
        return Err(Error::Ranks { shards: problem.shards.ranks(), ranks });
    }
    if problem.reduction == Reduction::Reproducible {
        problem.shards.check_edges(TILE)?;
    }
    let pattern = demand::any_head(&problem.pattern, problem.heads)?;
    let mut coverage = PatternCoverage::new(&pattern);
    let demands = comm.compute(0, |poll| {
        let demand = |owner| match owner == rank {
            true => Ok(Demand::default()),
            false => Demand::of(problem, &pattern, &mut coverage, rank, owner, poll),
        };
        (0..ranks).map(demand).collect::<Result<Vec<_>>>()
    })?;

    let (demanded, remote_queries) = exchange_demands(comm, &demands)?;
    let send_plan = SendPlan::of(problem, rank, demanded);
    let encoded: Vec<_> = (0..ranks).map(|to| send_plan.encode_for(to)).collect();
    let received = comm.all_to_all(SEND_PLANS, &encoded, "the send plan")?;
    let plans = received.iter().enumerate().map(|(owner, bytes)| send_plan::decode(owner, bytes));
    let received_plans = plans.collect::<Result<Vec<_>>>()?;
    let inputs = ScheduleInputs {
        rank,
        demands: &demands,
        received_plans: &received_plans,
        send_plan: &send_plan,
        remote_queries: &remote_queries,
    };
    Ok(Schedule::new(problem, &inputs))
}

/// Checks that all ranks have equal problems.
fn check_equal(comm: &mut Communicator<'_>, problem: &Problem) -> Result<()> {
    let fields = problem.fields();
    let mine: Vec<u8> = fields.iter().flat_map(|field| field.hash.to_le_bytes()).collect();
    let gathered = comm.allgather(0, &mine, "the digest of the problem")?;
    for (index, field) in fields.iter().enumerate() {
        let hash = |bytes: &[u8]| bytes[8 * index..8 * index + 8].to_vec();
        if gathered.iter().all(|bytes| hash(bytes) == hash(&mine)) {
            continue;
        }
        // The first field that differs is the same on every rank, so all ranks take part.
        let values = comm.allgather(VALUES, &encode_value(field), field.name)?;
        let mut groups: BTreeMap<Vec<u8>, (Vec<usize>, String)> = BTreeMap::new();
        for (rank, (bytes, value)) in gathered.iter().zip(&values).enumerate() {
            let group = || (Vec::new(), decode_value(value));
            groups.entry(hash(bytes)).or_insert_with(group).0.push(rank);
        }
        let mut values: Vec<_> = groups.into_values().collect();
        values.sort_by_key(|(ranks, _)| (ranks.len(), std::cmp::Reverse(ranks[0])));
        return Err(Error::Mismatch { what: field.name.to_owned(), values });
    }
    Ok(())
}

/// A value padded to [`VALUE_LEN`] bytes; a longer one ends with its digest instead.
fn encode_value(field: &Field) -> Vec<u8> {
    let mut text = field.value.clone();
    if text.len() > VALUE_LEN {
        let digest = format!("… (digest {:016x})", field.hash);
        let end = (0..=VALUE_LEN - digest.len()).rfind(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
        text.push_str(&digest);
    }
    let mut bytes = text.into_bytes();
    bytes.resize(VALUE_LEN, 0);
    bytes
}

fn decode_value(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}

/// Sends each rank this one's demand; returns per rank the keys that it needs, and the queries that it
/// sends.
fn exchange_demands(
    comm: &mut Communicator<'_>,
    demands: &[Demand],
) -> Result<(Vec<Tokens>, Vec<Tokens>)> {
    let encoded = demands.iter().map(|demand| {
        let mut bytes = Vec::new();
        if *demand != Demand::default() {
            write_tokens(&mut bytes, &demand.keys);
            write_tokens(&mut bytes, &demand.remote_queries);
        }
        bytes
    });
    let encoded: Vec<_> = encoded.collect();
    let received = comm.all_to_all(DEMANDS, &encoded, "the demand")?;
    let mut keys = Vec::with_capacity(received.len());
    let mut queries = Vec::with_capacity(received.len());
    for bytes in &received {
        let mut reader = Reader::new(bytes);
        let empty = bytes.is_empty();
        let mut read = || if empty { Ok(Tokens::default()) } else { reader.tokens() };
        keys.push(read()?);
        queries.push(read()?);
    }
    Ok((keys, queries))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_end_with_their_digest() {
        let field = |value: String| Field { name: "pattern", hash: 0xab, value };
        let short = field("causal".to_owned());
        assert_eq!(decode_value(&encode_value(&short)), "causal");
        let long = encode_value(&field("ä".repeat(200)));
        assert_eq!(long.len(), VALUE_LEN);
        assert!(decode_value(&long).ends_with("ä… (digest 00000000000000ab)"));
    }
}
