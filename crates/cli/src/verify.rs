//! `longspan verify`: every kernel that this CPU can run against the `f64` oracle.
//!
//! ```text
//! for each case of the table, and each dtype:
//!     truth, naive = the oracle in f64, the formulas in f32        once, two threads
//!     for each instruction set:
//!         got = forward and backward                               run.rs
//!         judge(truth, naive, got)                                 judge.rs
//! ```
//!
//! [`verify`] takes the computation as a function, so that tests can pass one with wrong results.

mod digest;
mod judge;
mod report;
mod run;

use std::fmt;
use std::io::{Write, stdout};
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::Result;
use longspan::{ElementType, Isa, Precision};
use longspan_testing::{AttentionCase, Measure, Problem, Values, attention_cases, naive, truth};

use crate::args::Verify;
use crate::progress::Stage;
use digest::Digest;
use judge::Verdict;

/// One case, dtype and instruction set.
struct Check {
    /// The case's name.
    name: String,
    /// Description of the case.
    case: String,
    on: Kernel,
    verdict: Verdict,
    /// `None` without a result.
    digest: Option<Digest>,
}

/// Instruction set, dtype and precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kernel {
    isa: Isa,
    element: ElementType,
    precision: Precision,
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.isa, self.element)?;
        match self.precision {
            Precision::Highest => Ok(()),
            other => write!(f, ", {other}"),
        }
    }
}

impl Kernel {
    /// The errors, judged by the rule of the products that this kernel computes.
    fn judged(self, measure: Measure) -> Measure {
        match (self.isa, self.element, self.precision) {
            (Isa::Amx, ElementType::Bf16, Precision::Highest | Precision::High) => {
                measure.on_matrix_unit()
            }
            (Isa::Amx, ElementType::F32, Precision::High) => measure.of_split_products(),
            _ => measure,
        }
    }
}

/// The kernels to verify.
struct Scope {
    isas: Vec<Isa>,
    elements: Vec<ElementType>,
    precision: Precision,
}

/// `longspan verify`
pub(crate) fn run(args: &Verify) -> Result<()> {
    let scope = Scope {
        isas: match args.isa {
            Some(isa) => vec![Isa::choose(Some(isa))?],
            None => Isa::available(),
        },
        elements: args.dtype.map_or(ElementType::ALL.to_vec(), |element| vec![element]),
        precision: args.precision,
    };
    let mut cases = attention_cases();
    if args.quick {
        cases.retain(|case| work(case) <= SMALL);
    }
    let stage = Stage::share("verifying");
    let checks = verify(&cases, &scope, &run::compute, &|done| {
        stage.at(done as u64, cases.len() as u64);
    });
    drop(stage);

    let mut out = stdout().lock();
    match args.json {
        true => report::json(&checks, cases.len(), &scope, &mut out)?,
        false => {
            if args.verbose {
                report::table(&checks, &mut out)?;
            }
            report::summary(&checks, cases.len(), &mut out)?;
        }
    }
    out.flush()?;
    conclude(&checks)
}

/// An error if a check failed or there were none.
fn conclude(checks: &[Check]) -> Result<()> {
    let wrong = checks.iter().filter(|check| !check.verdict.is_right()).count();
    if checks.is_empty() || wrong > 0 {
        anyhow::bail!(
            "{wrong} of {} checks failed: results of this build on this CPU can't be trusted; \
             please report the lines above",
            checks.len()
        );
    }
    Ok(())
}

/// Pairs × dims of a case that counts as small: tens of milliseconds of the oracle's time.
const SMALL: usize = 9_000_000;

fn work(case: &AttentionCase) -> usize {
    let sizes = case.sizes();
    sizes.rows() * sizes.tokens_k * (sizes.dim_k + sizes.dim_v)
}

/// Computes a problem with a kernel.
type Compute = dyn Fn(&AttentionCase, &Problem, Kernel) -> longspan::Result<Values<f32>>;

/// The oracle's precision for an element type.
fn rounding(element: ElementType) -> longspan_testing::Precision {
    match element {
        ElementType::Bf16 => longspan_testing::Precision::Bf16,
        ElementType::F16 => longspan_testing::Precision::F16,
        _ => longspan_testing::Precision::F32,
    }
}

/// Every case with every dtype and instruction set; calls `done` with the number of finished cases.
fn verify(
    cases: &[AttentionCase],
    scope: &Scope,
    compute: &Compute,
    done: &dyn Fn(usize),
) -> Vec<Check> {
    let mut checks = Vec::with_capacity(cases.len() * scope.elements.len() * scope.isas.len());
    for (number, case) in cases.iter().enumerate() {
        done(number);
        let exact = case.problem();
        for &element in &scope.elements {
            let problem = exact.clone().rounded(rounding(element));
            let (truth, naive) = std::thread::scope(|scope| {
                let naive = scope.spawn(|| naive(&problem, case.sample));
                (truth(&problem, case.sample), naive.join().expect("the oracle doesn't panic"))
            });
            for &isa in &scope.isas {
                let on = Kernel { isa, element, precision: scope.precision };
                // A panic fails this check only.
                let got = catch_unwind(AssertUnwindSafe(|| compute(case, &problem, on)));
                let digest = match &got {
                    Ok(Ok(got)) => Some(Digest::of(got)),
                    _ => None,
                };
                let verdict = match got {
                    Ok(Ok(got)) => {
                        let all = Measure::all(&problem, &truth, &naive, &got, case.sample);
                        Verdict::Measured(all.into_iter().map(|one| on.judged(one)).collect())
                    }
                    Ok(Err(error)) => Verdict::Refused(error.to_string()),
                    Err(_) => Verdict::Refused("panicked".into()),
                };
                let (name, case) = (case.name.clone(), case.to_string());
                checks.push(Check { name, case, on, verdict, digest });
            }
        }
    }
    checks
}

#[cfg(test)]
mod tests {
    use longspan::Error;
    use longspan_testing::Rule;

    use super::*;

    fn one_case() -> Vec<AttentionCase> {
        vec![AttentionCase::new("a case", Rule::Causal, 70)]
    }

    fn portable(element: ElementType) -> Scope {
        Scope { isas: vec![Isa::Portable], elements: vec![element], precision: Precision::Highest }
    }

    type Spoil = &'static dyn Fn(&mut Values<f32>);

    /// The checks of a computation whose results are modified by `spoil`.
    fn spoiled(element: ElementType, spoil: Spoil) -> Vec<Check> {
        let compute = move |case: &AttentionCase, problem: &Problem, on| {
            let mut got = run::compute(case, problem, on)?;
            spoil(&mut got);
            Ok(got)
        };
        verify(&one_case(), &portable(element), &compute, &|_| ())
    }

    fn text(checks: &[Check]) -> String {
        let mut out = Vec::new();
        report::summary(checks, 1, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn correct_results_pass() {
        for element in ElementType::ALL {
            let checks = spoiled(element, &|_| ());
            let text = text(&checks);
            assert!(conclude(&checks).is_ok(), "{text}");
            assert!(text.contains(&format!("1 case on portable, {element}: all right")), "{text}");
        }
    }

    #[test]
    fn errors_are_detected_in_every_tensor() {
        let spoils: [(&str, Spoil); 6] = [
            // One element, off by 1e-4 of the typical magnitude.
            ("out", &|got| got.out[77] += 1e-4),
            ("lse", &|got| got.lse[3] += 1e-4),
            ("dq", &|got| got.dq[900] -= 1e-4),
            ("dk", &|got| got.dk[5] *= 1.01),
            ("dv", &|got| got.dv[4_000] = f32::NAN),
            ("out", &|got| got.out.fill(0.0)),
        ];
        // One element, off by a few roundings to bf16; and lse, which is always f32.
        let narrow: [(&str, Spoil); 4] = [
            ("out", &|got| got.out[77] += 0.1),
            ("lse", &|got| got.lse[3] += 1e-4),
            ("dq", &|got| got.dq[900] -= 0.1),
            ("dv", &|got| got.dv[4_000] = f32::NAN),
        ];
        let all = spoils.map(|(tensor, spoil)| (ElementType::F32, tensor, spoil)).into_iter();
        let narrow = narrow.map(|(tensor, spoil)| (ElementType::Bf16, tensor, spoil));
        for (element, tensor, spoil) in all.chain(narrow) {
            let checks = spoiled(element, spoil);
            let message = conclude(&checks).unwrap_err().to_string();
            assert!(message.starts_with("1 of 1 checks failed"), "{message}");
            let text = text(&checks);
            assert!(text.contains("WRONG") && text.contains(&format!("{tensor}: error")), "{text}");
            assert!(text.contains("causal on 70 x 70"), "{text}");
        }
    }

    #[test]
    fn errors_and_panics_fail() {
        let refuse = |_: &AttentionCase, _: &Problem, on: Kernel| {
            Err(Error::Isa { asked: on.isa.name(), has: vec![] })
        };
        let panic = |_: &AttentionCase, _: &Problem, _| panic!("on purpose");
        let computes: [&Compute; 2] = [&refuse, &panic];
        for (compute, why) in computes.into_iter().zip(["asked for", "panicked"]) {
            let checks = verify(&one_case(), &portable(ElementType::F32), compute, &|_| ());
            assert!(conclude(&checks).is_err());
            assert!(text(&checks).contains(why), "{}", text(&checks));
        }
    }

    #[test]
    fn no_checks_fail() {
        assert!(conclude(&[]).is_err());
    }
}
