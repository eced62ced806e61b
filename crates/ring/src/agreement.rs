//! Agreement between ranks: equal problems, and from demands and send plans to this rank's schedule.
//! `ring` calls it during setup.
//!
//! ```text
//! allgather   digests of the problem        equal on every rank
//! all-to-all  demands                       which of a rank's keys each other rank needs
//! all-to-all  send plans                    how they get there
//! ```

use std::collections::BTreeMap;

use crate::bytes::{Reader, write_tokens};
use crate::communicator::Communicator;
use crate::demand::{Demand, Demands};
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
    let mut demands = Demands::new(problem)?;
    // By owner and band.
    let mine = comm.compute(0, |poll| {
        (0..ranks).map(|owner| demands.of(rank, owner, poll)).collect::<Result<Vec<_>>>()
    })?;
    let bands = demands.bands;
    let (demanded, remote_queries) = exchange_demands(comm, &mine, bands.len())?;
    let send_plans: Vec<_> =
        demanded.into_iter().map(|demanded| SendPlan::of(problem, rank, demanded)).collect();
    let encoded: Vec<_> = (0..ranks)
        .map(|to| {
            let mut bytes = Vec::new();
            send_plans.iter().for_each(|plan| plan.encode_for(to, &mut bytes));
            bytes
        })
        .collect();
    let received = comm.all_to_all(SEND_PLANS, &encoded, "the send plan")?;
    let decode = |(owner, bytes): (usize, &Vec<u8>)| {
        let mut reader = Reader::new(bytes);
        (0..bands.len()).map(|_| send_plan::decode(owner, &mut reader)).collect::<Result<Vec<_>>>()
    };
    let received_plans = received.iter().enumerate().map(decode).collect::<Result<Vec<_>>>()?;
    let inputs = ScheduleInputs {
        rank,
        bands: &bands,
        demands: &mine,
        received_plans: &received_plans,
        send_plans: &send_plans,
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

/// Tokens by band and rank.
type ByBand = Vec<Vec<Tokens>>;

/// Sends each rank this one's demand; returns per band and rank the keys that it needs, and the
/// queries that it sends.
fn exchange_demands(
    comm: &mut Communicator<'_>,
    demands: &[Vec<Demand>],
    bands: usize,
) -> Result<(ByBand, ByBand)> {
    let encoded = demands.iter().map(|demands| {
        let mut bytes = Vec::new();
        if demands.iter().any(|demand| *demand != Demand::default()) {
            for demand in demands {
                write_tokens(&mut bytes, &demand.keys);
                write_tokens(&mut bytes, &demand.remote_queries);
            }
        }
        bytes
    });
    let encoded: Vec<_> = encoded.collect();
    let received = comm.all_to_all(DEMANDS, &encoded, "the demand")?;
    let mut keys = vec![Vec::with_capacity(received.len()); bands];
    let mut queries = vec![Vec::with_capacity(received.len()); bands];
    for bytes in &received {
        let mut reader = Reader::new(bytes);
        let empty = bytes.is_empty();
        let mut read = || if empty { Ok(Tokens::default()) } else { reader.tokens() };
        for (keys, queries) in keys.iter_mut().zip(&mut queries) {
            keys.push(read()?);
            queries.push(read()?);
        }
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
