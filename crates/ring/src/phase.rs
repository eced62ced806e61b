//! What all ranks execute together, for message headers and errors. Any module may use it.

/// Steps of a phase are below; the final synchronization of a phase starts here.
pub(crate) const END: u32 = 1 << 30;

/// What all ranks execute together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Setup,
    Forward,
    Backward,
}

impl Phase {
    pub(crate) const ALL: [Phase; 3] = [Phase::Setup, Phase::Forward, Phase::Backward];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Phase::Setup => "setup",
            Phase::Forward => "the forward pass",
            Phase::Backward => "the backward pass",
        }
    }
}

/// A step as errors print it.
pub(crate) fn step_name(step: u32) -> String {
    if step < END { format!("step {step}") } else { "the end".to_owned() }
}
