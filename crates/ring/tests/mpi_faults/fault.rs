//! What happens, to whom, and when.

use std::fmt;
use std::str::FromStr;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// The process is killed.
    Kill,
    /// It is stopped until all others have reported.
    Stop,
    /// It comes late, after the others' patience.
    Delay,
    /// It comes late, but not too late: all end well.
    Pause,
    /// Its host's link is cut.
    Cut,
    /// A bit of what it sends is turned.
    Flip,
    /// It sends a byte more.
    Grow,
    /// It sends what was meant for the hop before.
    Repeat,
    /// Its tensors have a token less.
    Shape,
    /// It means another pattern.
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
    /// Whether nothing else can be tried with the same processes.
    pub(crate) fn ends_a_process(self) -> bool {
        matches!(self, Kind::Kill | Kind::Cut)
    }
}

/// A fault. Hops are counted from the ring's making to the end of the first backward pass, of those
/// in which the victim sends something, and begin anew after the last.
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
        let numbers = text.split(' ').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        let &[kind, ranks, victim, hop, bit] = &numbers[..] else { panic!("{text}") };
        Ok(Fault { kind: ALL[kind], ranks, victim, hop, bit })
    }
}

/// One of each kind, and who is killed twice: the launcher ends all others, or lets them live.
pub(crate) fn few(hosts: bool) -> Vec<Fault> {
    random(if hosts { 1 } else { ALL.len() }, 0, hosts)
}

/// So many, of every kind in turn; with hosts of their own only what needs them.
pub(crate) fn random(count: usize, seed: u64, hosts: bool) -> Vec<Fault> {
    let kinds: Vec<_> = ALL.into_iter().filter(|kind| hosts == (*kind == Kind::Cut)).collect();
    let mut state = seed;
    let mut draw = |below: usize| {
        // splitmix64
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) % below as u64) as usize
    };
    (0..count)
        .map(|number| {
            let kind = kinds[number % kinds.len()];
            let ranks = if hosts { 3 } else { 3 + draw(2) };
            Fault { kind, ranks, victim: draw(ranks), hop: draw(1_000), bit: draw(1 << 20) }
        })
        .collect()
}
