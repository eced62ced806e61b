//! What a process does that `mpirun` has started: faults one after the other, and reports.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use longspan::{Arrived, Tensor};
use longspan_ring::{Error, Local, Mpi, Options, Outgoing, Ring, Shards, Transport};
use longspan_testing::{AttentionCase, Problem as Numbers, Rule};

use crate::common::unlucky::{Unlucky, flip, grow, repeat};
use crate::common::{Results, Share, both, options, positions, problem};
use crate::fault::{Fault, Kind};
use crate::launch::{FOLDER, LONE};
use crate::{LONG, PATIENCE, SLACK};

const TOKENS: u64 = 640;
const WINDOW: u64 = 200;

/// All of a rank's results: out, lse, dq, dk, dv.
type Found = [Vec<f32>; 5];

fn case(left: u64) -> AttentionCase {
    let sinks = Rule::Or(vec![Rule::Window { left, right: 0 }, Rule::Sinks { n: 3 }]);
    AttentionCase::new("faults", Rule::And(vec![Rule::Causal, sinks]), TOKENS)
}

/// Seconds since 1970.
pub(crate) fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64()
}

/// A file that is there as a whole or not at all.
fn write(folder: &Path, name: &str, text: &str) {
    let new = folder.join(format!("new.{name}"));
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, folder.join(name)).unwrap();
}

pub(crate) fn main(faults: &str) {
    let folder = PathBuf::from(std::env::var(FOLDER).expect("a folder for reports"));
    let faults: Vec<Fault> = faults.split(',').map(|fault| fault.parse().unwrap()).collect();
    let mut mpi = Mpi::world(LONG).unwrap();
    let (rank, ranks) = (mpi.rank(), mpi.size());
    write(&folder, &format!("pid.{rank}"), &std::process::id().to_string());
    let numbers = case(WINDOW).unmasked();
    let shards = Shards::contiguous(TOKENS, ranks, 1).unwrap();
    let (expected, hops) = expected(&numbers, &shards, rank);
    for (number, fault) in faults.iter().enumerate() {
        let mut own = Mpi::world(LONG).unwrap();
        mpi.meet(LONG).unwrap();
        let strike = |sends: &mut [Outgoing], last: &[Outgoing]| {
            write(&folder, &format!("struck.{number}"), &now().to_string());
            strike(fault, sends, last);
        };
        let struck = matches!(fault.kind, Kind::Shape | Kind::Pattern);
        let at = (rank == fault.victim && !struck).then_some(fault.hop % hops);
        let unlucky = Unlucky::new(&mut own, at, strike);
        if struck && rank == fault.victim {
            write(&folder, &format!("struck.{number}"), &now().to_string());
        }
        let ended = passes(unlucky, fault, &numbers, &shards);
        let said = match &ended {
            Ok(results) if *results == expected => "well".to_owned(),
            Ok(_) => "wrong".to_owned(),
            Err(error) => format!("error {error}"),
        };
        write(&folder, &format!("report.{number}.{rank}"), &format!("{}\n{said}", now()));
        if std::env::var_os(LONE).is_some() {
            // The launcher may end all others as soon as one ends.
            let reported = |rank| folder.join(format!("report.{number}.{rank}")).exists();
            let start = Instant::now();
            while start.elapsed() < PATIENCE + SLACK && !(0..ranks).all(reported) {
                std::thread::sleep(Duration::from_millis(10));
            }
            std::process::exit(1);
        }
        mpi.meet(LONG).unwrap();
    }
    mpi.close(LONG).unwrap();
}

/// This rank's results, and in how many hops it sends something on the way to them: found among
/// threads, whose bits are those of processes.
fn expected(numbers: &Numbers, shards: &Shards, rank: usize) -> (Found, usize) {
    std::thread::scope(|scope| {
        let start = |local: Local| {
            scope.spawn(move || {
                let mut unlucky =
                    Unlucky::new(local, None, |_: &mut [Outgoing], _: &[Outgoing]| ());
                let share = Share::of(numbers, &positions(shards, unlucky.rank()));
                let asked = problem(&case(WINDOW), shards.clone());
                let Results { out, lse, dq, dk, dv, .. } =
                    both(&mut unlucky, asked, &share).unwrap();
                ([out, lse, dq, dk, dv], unlucky.hops)
            })
        };
        let ranks: Vec<_> = Local::ranks(shards.ranks()).into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).nth(rank).expect("this rank")
    })
}

fn strike(fault: &Fault, sends: &mut [Outgoing], last: &[Outgoing]) {
    let signal = |name: &str| {
        let itself = std::process::id().to_string();
        assert!(Command::new("kill").args(["-s", name, &itself]).status().unwrap().success());
        // A signal may take its time.
        std::thread::sleep(Duration::from_millis(50));
    };
    match fault.kind {
        Kind::Kill => signal("KILL"),
        Kind::Stop => signal("STOP"),
        Kind::Delay => std::thread::sleep(PATIENCE + Duration::from_millis(1_500)),
        Kind::Pause => std::thread::sleep(PATIENCE / 3),
        Kind::Cut => {
            let mut cut = Command::new("ip");
            assert!(cut.args(["link", "set", "eth0", "down"]).status().unwrap().success());
        }
        Kind::Flip => flip(sends, fault.bit),
        Kind::Grow => grow(sends),
        Kind::Repeat => repeat(sends, last),
        Kind::Shape | Kind::Pattern => unreachable!("not at a hop"),
    }
}

/// Both passes twice, until an error: what befalls the last messages of a pass shows in the next.
fn passes<T: Transport>(
    transport: T,
    fault: &Fault,
    numbers: &Numbers,
    shards: &Shards,
) -> Result<Found, Error> {
    let rank = transport.rank();
    let wrong = |kind| fault.kind == kind && fault.victim == rank;
    let mut chosen = positions(shards, rank);
    let right = Share::of(numbers, &chosen);
    chosen.pop();
    let short = Share::of(numbers, &chosen);
    let window = WINDOW + u64::from(wrong(Kind::Pattern));
    let asked = problem(&case(window), shards.clone());
    let mut ring = Ring::new(transport, asked, Options { patience: PATIENCE, ..options() })?;
    let mut results = None;
    for turn in 0..2 {
        let here = |pass: usize| wrong(Kind::Shape) && fault.hop % 4 == 2 * turn + pass;
        let inputs = if here(0) { short.inputs() } else { right.inputs() };
        let output = ring.forward(inputs.q, inputs.k, inputs.v)?;
        let inputs = if here(1) { short.inputs() } else { right.inputs() };
        let gradients = ring.backward(inputs, Arrived::of(&output, right.dout.view()))?;
        let flat = |tensor: &Tensor<f32>| tensor.as_slice().to_vec();
        let [dq, dk, dv] = [&gradients.dq, &gradients.dk, &gradients.dv].map(flat);
        results = Some([flat(&output.out), output.lse.clone(), dq, dk, dv]);
    }
    Ok(results.expect("two turns"))
}
