//! A process under `mpirun`: faults in turn, and their reports.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use longspan::Tensor;
use longspan_ring::{Error, Local, Mpi, Options, Outgoing, Problem, Ring, Shards, Transport};
use longspan_testing::{AttentionCase, Problem as Numbers, Rule};

use crate::common::faulty::{Faulty, flip, grow, repeat};
use crate::common::{Results, Share, both, dilated_problem, options, positions, problem};
use crate::fault::{Fault, Kind};
use crate::launch::{FOLDER, LONE};
use crate::{LONG, SLACK, TIMEOUT};

const TOKENS: usize = 640;
const WINDOW: u64 = 200;

/// A rank's results: out, lse, dq, dk, dv.
type Found = [Vec<f32>; 5];

fn case(left: u64) -> AttentionCase {
    let sinks = Rule::Or(vec![Rule::Window { left, right: 0 }, Rule::Sinks { n: 3 }]);
    AttentionCase::new("faults", Rule::And(vec![Rule::Causal, sinks]), TOKENS as u64)
}

/// A window with sinks, or dilated attention with segments of twice that.
fn problem_of(dilated: bool, window: u64, shards: &Shards) -> Problem {
    match dilated {
        true => dilated_problem(&case(window), shards.clone(), 2 * window),
        false => problem(&case(window), shards.clone()),
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64()
}

/// Writes a file atomically.
fn write(folder: &Path, name: &str, text: &str) {
    let new = folder.join(format!("new.{name}"));
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, folder.join(name)).unwrap();
}

pub(crate) fn main(faults: &str) {
    let folder = PathBuf::from(std::env::var(FOLDER).expect("a directory for reports"));
    let faults: Vec<Fault> = faults.split(',').map(|fault| fault.parse().unwrap()).collect();
    let mut mpi = Mpi::world(LONG).unwrap();
    let (rank, ranks) = (mpi.rank(), mpi.size());
    write(&folder, &format!("pid.{rank}"), &std::process::id().to_string());
    let data = case(WINDOW).unmasked();
    let shards = Shards::contiguous(TOKENS, ranks, 1).unwrap();
    let both = [false, true].map(|dilated| expected(&data, &shards, dilated, rank));
    for (index, fault) in faults.iter().enumerate() {
        let dilated = fault.bit % 2 == 1;
        let (expected, hops) = &both[usize::from(dilated)];
        let mut own = Mpi::world(LONG).unwrap();
        mpi.barrier(LONG).unwrap();
        let inject = |sends: &mut [Outgoing], last: &[Outgoing]| {
            write(&folder, &format!("injected.{index}"), &now().to_string());
            self::inject(fault, sends, last);
        };
        let by_argument = matches!(fault.kind, Kind::Shape | Kind::Pattern);
        let at = (rank == fault.victim && !by_argument).then_some(fault.hop % *hops);
        let faulty = Faulty::new(&mut own, at, inject);
        if by_argument && rank == fault.victim {
            write(&folder, &format!("injected.{index}"), &now().to_string());
        }
        let ended = passes(faulty, fault, &data, &shards, dilated);
        let result = match &ended {
            Ok(results) if results == expected => "ok".to_owned(),
            Ok(_) => "wrong".to_owned(),
            Err(error) => format!("error {error}"),
        };
        write(&folder, &format!("report.{index}.{rank}"), &format!("{}\n{result}", now()));
        if std::env::var_os(LONE).is_some() {
            // The launcher may end all other ranks when one ends.
            let reported = |rank| folder.join(format!("report.{index}.{rank}")).exists();
            let start = Instant::now();
            while start.elapsed() < TIMEOUT + SLACK && !(0..ranks).all(reported) {
                std::thread::sleep(Duration::from_millis(10));
            }
            std::process::exit(1);
        }
        mpi.barrier(LONG).unwrap();
    }
    mpi.close(LONG).unwrap();
}

/// This rank's results, and the index of its hops with sends: from threads, whose bits are those of
/// processes.
fn expected(data: &Numbers, shards: &Shards, dilated: bool, rank: usize) -> (Found, usize) {
    std::thread::scope(|scope| {
        let start = |local: Local| {
            scope.spawn(move || {
                let mut faulty = Faulty::new(local, None, |_: &mut [Outgoing], _: &[Outgoing]| ());
                let share = Share::of(data, &positions(shards, faulty.rank()));
                let problem = problem_of(dilated, WINDOW, shards);
                let Results { out, lse, dq, dk, dv, .. } =
                    both(&mut faulty, problem, &share).unwrap();
                ([out, lse, dq, dk, dv], faulty.hops)
            })
        };
        let ranks: Vec<_> = Local::ranks(shards.ranks()).into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).nth(rank).expect("this rank")
    })
}

fn inject(fault: &Fault, sends: &mut [Outgoing], last: &[Outgoing]) {
    let signal = |name: &str| {
        let itself = std::process::id().to_string();
        assert!(Command::new("kill").args(["-s", name, &itself]).status().unwrap().success());
        // Signal delivery is asynchronous.
        std::thread::sleep(Duration::from_millis(50));
    };
    match fault.kind {
        Kind::Kill => signal("KILL"),
        Kind::Stop => signal("STOP"),
        Kind::Delay => std::thread::sleep(TIMEOUT + Duration::from_millis(1_500)),
        Kind::Pause => std::thread::sleep(TIMEOUT / 3),
        Kind::Cut => {
            let mut cut = Command::new("ip");
            assert!(cut.args(["link", "set", "eth0", "down"]).status().unwrap().success());
        }
        Kind::Flip => flip(sends, fault.bit),
        Kind::Grow => grow(sends),
        Kind::Repeat => repeat(sends, last),
        Kind::Shape | Kind::Pattern => unreachable!("not injected at a hop"),
    }
}

/// Both passes twice, until an error: a fault in the last messages of a pass shows in the next.
fn passes<T: Transport>(
    transport: T,
    fault: &Fault,
    data: &Numbers,
    shards: &Shards,
    dilated: bool,
) -> Result<Found, Error> {
    let rank = transport.rank();
    let wrong = |kind| fault.kind == kind && fault.victim == rank;
    let mut chosen = positions(shards, rank);
    let right = Share::of(data, &chosen);
    chosen.pop();
    let short = Share::of(data, &chosen);
    let window = WINDOW + u64::from(wrong(Kind::Pattern));
    let problem = problem_of(dilated, window, shards);
    let mut ring = Ring::new(transport, problem, Options { timeout: TIMEOUT, ..options() })?;
    let mut results = None;
    for turn in 0..2 {
        let here = |pass: usize| wrong(Kind::Shape) && fault.hop % 4 == 2 * turn + pass;
        let inputs = if here(0) { short.inputs() } else { right.inputs() };
        let output = ring.forward(inputs)?;
        let inputs = if here(1) { short.inputs() } else { right.inputs() };
        let gradients = ring.backward(inputs, &output, right.dout.view())?;
        let flat = |tensor: &Tensor<f32>| tensor.as_slice().to_vec();
        let [dq, dk, dv] = [&gradients.dq, &gradients.dk, &gradients.dv].map(flat);
        results = Some([flat(&output.out), output.lse.clone(), dq, dk, dv]);
    }
    Ok(results.expect("two turns"))
}
