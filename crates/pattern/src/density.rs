//! A pattern scaled to a density: one free parameter, found by counting pairs. Top layer.
//!
//! ```text
//! (low, high) = the ends of the range
//! while high − low > 1:
//!     middle = (low + high) / 2
//!     the end on the same side of the target as the middle moves there
//! the nearest density of all that were counted
//! ```
//!
//! Both ends stay on different sides of the target, so that a density that is monotone but for
//! rounding (`dilated` whose rate does not divide its segment) is scaled as well.

use std::ops::{ControlFlow, Range, RangeInclusive};

use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::meter::{Progress, ignore_progress};
use crate::pattern::Pattern;
use crate::shape::Shape;

/// How far a density may be from its target, relative to that.
const TOLERANCE: f64 = 0.02;

/// The parameter in `range` whose pattern has the density (active pairs ÷ all pairs,
/// [`Layout::density`]) nearest to `density` at `shape`, and that pattern.
///
/// The density has to grow or to fall with the parameter. As many layouts are compiled as the range
/// has bits. An error if the nearest density is more than 2 % of `density` away from it.
///
/// ```
/// use longspan_pattern::{Layout, Pattern, Shape, scale_to_density};
///
/// // How far back may a causal window reach, if 5 % of all pairs are to be active?
/// let make = |left| Ok(Pattern::causal() & (Pattern::window(left, 0)? | Pattern::sinks(4)?));
/// let shape = Shape::new(16_384, 16_384);
/// let (left, pattern) = scale_to_density(make, 0..=16_383, &shape, 0.05)?;
/// assert_eq!((left, pattern.to_string().as_str()), (836, "causal & (window(836, 0) | sinks(4))"));
/// assert!((Layout::compile(&pattern, &shape)?.density()? - 0.05).abs() < 0.001);
///
/// // Patterns are also written as text.
/// let (stride, _) =
///     scale_to_density(|n| format!("strided({n})").parse(), 1..=16_384, &shape, 0.02)?;
/// assert_eq!(stride, 50);
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
pub fn scale_to_density(
    make: impl FnMut(u64) -> Result<Pattern>,
    range: RangeInclusive<u64>,
    shape: &Shape,
    density: f64,
) -> Result<(u64, Pattern)> {
    scale_to_density_with(make, range, shape, density, ignore_progress)
}

/// The same with a progress hook, whose rows are those of one layout at a time: see
/// [`Layout::compile_with`].
pub fn scale_to_density_with(
    mut make: impl FnMut(u64) -> Result<Pattern>,
    range: RangeInclusive<u64>,
    shape: &Shape,
    density: f64,
    mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<(u64, Pattern)> {
    let (mut low, mut high) = range.into_inner();
    if low > high {
        return Err(Error::Density(format!(
            "the parameter is from {low} to {high}, expected a range that is not empty"
        )));
    }
    if !(density > 0.0 && density <= 1.0) {
        return Err(Error::Density(format!("{density}, expected above 0 and at most 1")));
    }
    let frame = shape.resolve()?;
    let first = frame.row_tokens(frame.rows.start).start;
    let queries = frame.rows.clone().next_back().map_or(0, |row| frame.row_tokens(row).end - first);
    let pairs = queries as f64 * frame.keys.len() as f64;
    let rows = frame.rows.start.into()..frame.rows.end.into();
    let mut count = |parameter| -> Result<Candidate> {
        let pattern = make(parameter)?;
        let active = active_pairs(&pattern, shape, rows.clone(), &mut progress)?;
        let density = if active == 0 { 0.0 } else { active as f64 / pairs };
        Ok(Candidate { parameter, density, pattern })
    };
    let ends = [count(low)?, count(high)?];
    let of_ends = [ends[0].density, ends[1].density];
    let above = |found: f64| found > density;
    let [first, last] = ends;
    let mut nearest = first.nearer(last, density);
    while above(of_ends[0]) != above(of_ends[1]) && high - low > 1 {
        let middle = count(low.midpoint(high))?;
        let end = if above(middle.density) == above(of_ends[0]) { &mut low } else { &mut high };
        *end = middle.parameter;
        nearest = nearest.nearer(middle, density);
    }
    let Candidate { parameter, density: found, pattern } = nearest;
    if (found - density).abs() <= TOLERANCE * density {
        return Ok((parameter, pattern));
    }
    Err(Error::Density(format!(
        "{density} is not reached within 2 %: the nearest is {found} with parameter {parameter}, and \
         the ends of the range have {} and {}; widen the range, make another parameter of the \
         pattern the free one, or ask for {found}",
        of_ends[0], of_ends[1]
    )))
}

/// Active pairs in some rows, counted in parts where the layout of all would be too large: parameters
/// on the way to the one that is found may have far more runs than that.
fn active_pairs(
    pattern: &Pattern,
    shape: &Shape,
    rows: Range<u64>,
    progress: &mut Progress<'_>,
) -> Result<u128> {
    let part = shape.clone().rows(rows.clone());
    match Layout::compile_with(pattern, &part, &mut *progress) {
        Err(Error::TooLarge { .. }) if rows.end - rows.start > 1 => {
            let middle = rows.start.midpoint(rows.end);
            Ok(active_pairs(pattern, shape, rows.start..middle, progress)?
                + active_pairs(pattern, shape, middle..rows.end, progress)?)
        }
        layout => Ok(layout?.counts_with(progress)?.active_pairs),
    }
}

/// A parameter that was tried.
struct Candidate {
    parameter: u64,
    density: f64,
    pattern: Pattern,
}

impl Candidate {
    /// The one nearer to the target.
    fn nearer(self, other: Self, target: f64) -> Self {
        let distance = |candidate: &Self| (candidate.density - target).abs();
        if distance(&other) < distance(&self) { other } else { self }
    }
}
