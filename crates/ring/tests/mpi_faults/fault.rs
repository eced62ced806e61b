//! Faults: kind, rank and hop.

use std::fmt;
use std::str::FromStr;

use longspan_testing::Random;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// The process is killed.
    Kill,
    /// It is stopped until all others have reported.
    Stop,
    /// It is late by more than the timeout.
    Delay,
    /// It is late by less than the timeout: all ranks succeed.
    Pause,
    /// Its host's network link is cut.
    Cut,
    /// A bit of its messages is flipped.
    Flip,
    /// Its messages are a byte longer.
    Grow,
    /// It repeats the messages of the hop before.
    Repeat,
    /// Its tensors lack a token.
    Shape,
    /// It is called with another pattern.
    Pattern,
}

const ALL: [Kind; 10] = [
    Kind::Kill,
    Kind::Stop,
    Kind::Delay,
    Kind::Pause,
    Kind::Cut,
    Kind::Flip,
    Kind::Grow,
    Kind::Repeat,
    Kind::Shape,
    Kind::Pattern,
];

impl Kind {
    /// Whether the processes cannot be reused for further faults.
    pub(crate) fn ends_process(self) -> bool {
        matches!(self, Kind::Kill | Kind::Cut)
    }
}

/// A fault. `hop` counts the hops with sends of the victim from `Ring::new` to the end of the first
/// backward pass, modulo their number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) ranks: usize,
    pub(crate) victim: usize,
    pub(crate) hop: usize,
    pub(crate) bit: usize,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { kind, ranks, victim, hop, bit } = self;
        write!(f, "{} {ranks} {victim} {hop} {bit}", *kind as usize)
    }
}

impl FromStr for Fault {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fields = text.split(' ').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        let &[kind, ranks, victim, hop, bit] = &fields[..] else { panic!("{text}") };
        Ok(Fault { kind: ALL[kind], ranks, victim, hop, bit })
    }
}

/// One of each kind, and two kills: with a launcher that ends all other ranks, and with one that does
/// not.
pub(crate) fn few(hosts: bool) -> Vec<Fault> {
    random(if hosts { 1 } else { ALL.len() }, 0, hosts)
}

/// `count` faults, of every kind in turn; with one host per rank only those that need it.
pub(crate) fn random(count: usize, seed: u64, hosts: bool) -> Vec<Fault> {
    let kinds: Vec<_> = ALL.into_iter().filter(|kind| hosts == (*kind == Kind::Cut)).collect();
    let mut random = Random::new(seed);
    let mut draw = |limit: usize| random.below(limit as u64) as usize;
    (0..count)
        .map(|index| {
            let kind = kinds[index % kinds.len()];
            let ranks = if hosts { 3 } else { 3 + draw(2) };
            Fault { kind, ranks, victim: draw(ranks), hop: draw(1_000), bit: draw(1 << 20) }
        })
        .collect()
}
