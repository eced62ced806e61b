//! The verdict on one check.

use longspan_testing::Measure;

/// The result of one check.
#[derive(Debug)]
pub(super) enum Verdict {
    /// The errors of all tensors.
    Measured(Vec<Measure>),
    /// No result: the error.
    Refused(String),
}

impl Verdict {
    pub(super) fn is_right(&self) -> bool {
        match self {
            Verdict::Measured(measures) => {
                !measures.is_empty() && measures.iter().all(Measure::holds)
            }
            Verdict::Refused(_) => false,
        }
    }

    /// The error of a tensor as a multiple of the rounding error.
    pub(super) fn ratio(&self, tensor: &str) -> Option<f64> {
        match self {
            Verdict::Measured(measures) => {
                measures.iter().find(|measure| measure.tensor == tensor).map(Measure::ratio)
            }
            Verdict::Refused(_) => None,
        }
    }

    /// The limit of the error of a tensor, likewise.
    pub(super) fn limit(&self, tensor: &str) -> Option<f64> {
        match self {
            Verdict::Measured(measures) => {
                let measure = measures.iter().find(|measure| measure.tensor == tensor)?;
                (measure.best > 0.0).then(|| measure.limit() / measure.best)
            }
            Verdict::Refused(_) => None,
        }
    }

    /// The largest error as a share of its limit; 0 where both are 0.
    pub(super) fn of_limit(&self) -> Option<f64> {
        match self {
            Verdict::Measured(measures) => measures.iter().map(Measure::of_limit).reduce(f64::max),
            Verdict::Refused(_) => None,
        }
    }

    /// The violations, one per line.
    pub(super) fn complaints(&self) -> Vec<String> {
        match self {
            Verdict::Measured(measures) => {
                measures.iter().filter(|measure| !measure.holds()).map(Measure::to_string).collect()
            }
            Verdict::Refused(why) => vec![why.clone()],
        }
    }
}
