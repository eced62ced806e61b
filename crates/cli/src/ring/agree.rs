//! Comparison of options between ranks.
//!
//! A ring compares its problem between ranks itself. Options of this command also determine which
//! messages follow: with another `--repeat` a rank would receive unexpected messages and report
//! them as corrupt.

use std::time::Duration;

use anyhow::{Context, Result};
use longspan_ring::{Buffer, Hop, Incoming, Outgoing, Transport};

use crate::compile::BadInput;

/// An option, and its value on this rank.
pub(super) type Setting = (&'static str, u64);

/// Compares options with all ranks. The result is the same on every rank: all fail or none.
pub(super) fn agree<const N: usize>(
    transport: &mut dyn Transport,
    settings: [Setting; N],
    timeout: Duration,
) -> Result<()> {
    let (rank, size) = (transport.rank(), transport.size());
    let mine = settings.map(|(_, value)| value);
    let others = || (0..size).filter(|&other| other != rank);
    let message = || Buffer::from(bytemuck::cast_slice::<u64, u8>(&mine));
    let mut sends: Vec<_> = others().map(|to| Outgoing { to, bytes: message() }).collect();
    let mut receives: Vec<_> =
        others().map(|from| Incoming { from, bytes: Buffer::zeroed(size_of_val(&mine)) }).collect();
    let hop = Hop { sends: &mut sends, receives: &mut receives, timeout };
    transport.hop(hop, &mut |_| ()).context("comparing options with the other ranks")?;

    for (index, (option, value)) in settings.into_iter().enumerate() {
        let mut values = vec![value; size];
        for receive in &receives {
            values[receive.from] = bytemuck::cast_slice::<u8, u64>(&receive.bytes)[index];
        }
        if let Some(other) = values.iter().position(|&value| value != values[0]) {
            return Err(BadInput(format!(
                "ranks disagree about {option}: rank 0 has {}, rank {other} has {}; start every rank \
                 with the same {option}",
                values[0], values[other]
            ))
            .into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use longspan_ring::Local;

    use super::*;

    /// The error of each rank, empty where there is none.
    fn errors(of_ranks: &[[u64; 2]]) -> Vec<String> {
        std::thread::scope(|scope| {
            let start = |(mut transport, [repeat, check]): (Local, [u64; 2])| {
                let settings = [("--repeat", repeat), ("--check", check)];
                scope.spawn(move || agree(&mut transport, settings, Duration::from_secs(10)))
            };
            let ranks = Local::ranks(of_ranks.len()).into_iter().zip(of_ranks.iter().copied());
            let ranks: Vec<_> = ranks.map(start).collect();
            let results = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
            results
                .map(|result| result.map_or_else(|error| error.to_string(), |()| String::new()))
                .collect()
        })
    }

    #[test]
    fn equal_options_pass() {
        assert_eq!(errors(&[[3, 0]]), [""]);
        assert_eq!(errors(&[[3, 1]; 4]), [""; 4]);
    }

    #[test]
    fn all_ranks_name_option_values_and_remedy() {
        let repeat = "ranks disagree about --repeat: rank 0 has 3, rank 2 has 4; start every rank with \
                      the same --repeat";
        assert_eq!(errors(&[[3, 0], [3, 0], [4, 0]]), [repeat; 3]);
        let check = "ranks disagree about --check: rank 0 has 1, rank 1 has 0; start every rank with the \
                     same --check";
        assert_eq!(errors(&[[2, 1], [2, 0]]), [check; 2]);
    }
}
