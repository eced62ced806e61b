//! The report: failing checks and a summary per kernel, a table of all checks, or JSON.

use std::collections::BTreeMap;
use std::io::{Result, Write};

use serde::Serialize;

use super::{Check, Kernel, Scope};
use crate::number::{count, shortened};
use crate::table;

/// The compared tensors, in the order of the columns.
const TENSORS: [&str; 5] = ["out", "lse", "dq", "dk", "dv"];
/// Characters kept of a case's name.
const NAME: usize = 40;

/// A table with one line per check.
pub(super) fn table(checks: &[Check], out: &mut impl Write) -> Result<()> {
    let header = ["case", "isa", "dtype", "out", "lse", "dq", "dk", "dv", "of limit", ""];
    let mut rows = vec![header.map(String::from)];
    for check in checks {
        let ratio = |tensor| match check.verdict.ratio(tensor) {
            Some(ratio) => format!("{ratio:.2}"),
            None => "-".to_string(),
        };
        let [a, b, c, d, e] = TENSORS.map(ratio);
        let verdict = if check.verdict.is_right() { "right" } else { "WRONG" };
        let name = shortened(&check.name, NAME);
        let (isa, element) = (check.on.isa.to_string(), check.on.element.to_string());
        let of_limit = match check.verdict.of_limit() {
            Some(share) => format!("{:.0} %", 100.0 * share),
            None => "-".to_string(),
        };
        rows.push([name, isa, element, a, b, c, d, e, of_limit, verdict.to_string()]);
    }
    writeln!(out, "errors, as multiples of the rounding error of the dtype:")?;
    table::print(&rows, 3, out)?;
    writeln!(out)
}

/// Every failing check with its errors, and one line per kernel.
pub(super) fn summary(checks: &[Check], cases: usize, out: &mut impl Write) -> Result<()> {
    for check in checks.iter().filter(|check| !check.verdict.is_right()) {
        writeln!(out, "WRONG on {}: {}", check.on, check.case)?;
        for complaint in check.verdict.complaints() {
            writeln!(out, "  {complaint}")?;
        }
    }
    let mut kernels: Vec<Kernel> = Vec::new();
    for check in checks {
        if !kernels.contains(&check.on) {
            kernels.push(check.on);
        }
    }
    for kernel in kernels {
        let of_kernel: Vec<&Check> = checks.iter().filter(|check| check.on == kernel).collect();
        let wrong = of_kernel.iter().filter(|check| !check.verdict.is_right()).count();
        let verdict = match wrong {
            0 => "all right".to_string(),
            wrong => format!("{wrong} WRONG"),
        };
        let worst = match worst(&of_kernel) {
            Some((ratio, tensor, name)) => format!("; worst {ratio:.2} ({tensor}, {name})"),
            None => String::new(),
        };
        writeln!(out, "{} on {kernel}: {verdict}{worst}", count(cases, "case"))?;
    }
    Ok(())
}

/// The largest error, with its tensor and case.
fn worst<'a>(checks: &[&'a Check]) -> Option<(f64, &'static str, &'a str)> {
    let each = checks.iter().flat_map(|check| {
        let ratio = |tensor| Some((check.verdict.ratio(tensor)?, tensor, check.name.as_str()));
        TENSORS.into_iter().filter_map(ratio)
    });
    each.max_by(|a, b| a.0.total_cmp(&b.0))
}

#[derive(Serialize)]
struct Object<'a> {
    version: &'static str,
    cases: usize,
    isas: Vec<String>,
    precision: String,
    dtypes: Vec<String>,
    checks: Vec<CheckObject<'a>>,
    wrong: usize,
}

#[derive(Serialize)]
struct CheckObject<'a> {
    case: &'a str,
    about: &'a str,
    isa: String,
    dtype: String,
    right: bool,
    /// Multiples of the rounding error; `None` where a result isn't finite.
    errors: BTreeMap<&'static str, Option<f64>>,
    /// Their limits; `None` where the rounding error is 0.
    limits: BTreeMap<&'static str, Option<f64>>,
    /// A hash of the bits of all results; `None` without results.
    digest: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    complaints: Vec<String>,
}

/// One JSON object and a line break.
pub(super) fn json<'a>(
    checks: &'a [Check],
    cases: usize,
    scope: &Scope,
    out: &mut impl Write,
) -> Result<()> {
    let object = |check: &'a Check| {
        let Check { name, case, on, verdict, digest } = check;
        let finite = |number: Option<f64>| number.filter(|number| number.is_finite());
        let each = |of: &dyn Fn(&str) -> Option<f64>| {
            TENSORS.into_iter().map(|tensor| (tensor, finite(of(tensor)))).collect()
        };
        CheckObject {
            case: name,
            about: case,
            isa: on.isa.to_string(),
            dtype: on.element.to_string(),
            right: verdict.is_right(),
            errors: each(&|tensor| verdict.ratio(tensor)),
            limits: each(&|tensor| verdict.limit(tensor)),
            digest: digest.map(|digest| digest.to_string()),
            complaints: verdict.complaints(),
        }
    };
    let object = Object {
        version: env!("CARGO_PKG_VERSION"),
        cases,
        isas: scope.isas.iter().map(ToString::to_string).collect(),
        precision: scope.precision.to_string(),
        dtypes: scope.elements.iter().map(ToString::to_string).collect(),
        checks: checks.iter().map(object).collect(),
        wrong: checks.iter().filter(|check| !check.verdict.is_right()).count(),
    };
    writeln!(out, "{}", serde_json::to_string_pretty(&object)?)
}
