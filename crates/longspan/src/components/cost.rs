//! Whether components are faster than a layout as it is, and what it costs: a model over tile counts, with
//! constants per instruction set and element type. For engines outside of this crate, the number of blocks.

use longspan_pattern::{Layout, Split, TileCounts};

use crate::dtype::{Element, ElementType};
use crate::error::{Error, Result};
use crate::exec::{Hook, Monitor};
use crate::isa::Isa;
use crate::options::Options;

/// The time of what is not a pair of a Full block, in the times of such pairs.
struct Costs {
    /// A pair of a Partial block.
    partial: f64,
    /// Starting and ending a row of blocks, per query.
    query: f64,
    /// The same where a state is read and written.
    state: f64,
    /// A call of the kernel.
    call: f64,
}

impl Costs {
    /// Measured with `strided` and `dilated` patterns on the instruction sets of x86-64
    /// (`examples/pattern_cost.rs`); others are like those.
    fn of(dtype: ElementType, options: &Options) -> Result<Self> {
        let isa = Isa::choose(options.isa)?;
        Ok(match options.precision.compute_types(dtype, isa).multiplied {
            ElementType::F32 => Costs { partial: 1.1, query: 40.0, state: 130.0, call: 20_000.0 },
            _ => Costs { partial: 1.5, query: 100.0, state: 400.0, call: 60_000.0 },
        })
    }

    /// The time of a layout as it is.
    fn natural(&self, tiles: &TileCounts) -> f64 {
        self.blocks(tiles) + self.query * tiles.queries as f64
    }

    /// The time of components.
    fn split(&self, tiles: &TileCounts) -> f64 {
        self.blocks(tiles) + self.state * tiles.queries as f64
    }

    fn blocks(&self, tiles: &TileCounts) -> f64 {
        let TileCounts { full_pairs, partial_pairs, calls, .. } = *tiles;
        full_pairs as f64 + self.partial * partial_pairs as f64 + self.call * calls as f64
    }
}

/// Components are chosen where they take at most this share of the time of a layout as it is: the model
/// does not know of caches and threads.
const WORTH: f64 = 0.8;

/// The components of a layout, if kernels compute it as them.
pub(super) fn chosen<'a>(
    options: &Options,
    dtype: ElementType,
    layout: &'a Layout,
    monitor: &Monitor<'_>,
) -> Result<Option<&'a Split>> {
    if options.uniform || options.split == Some(false) {
        return Ok(None);
    }
    let split = components(layout, monitor)?;
    let Some(split) = split.filter(|_| options.split.is_none()) else { return Ok(split) };
    let costs = Costs::of(dtype, options)?;
    let faster = costs.split(split.tiles()) < WORTH * costs.natural(split.natural_tiles());
    Ok(faster.then_some(split))
}

/// Engines that compute all pairs of a block get components where these have at most one block in so many:
/// each is a launch of its own, and joining its rows to those of the others reads and writes every output,
/// so that a saving of less than half is uncertain on any device.
const FEWER: usize = 2;

/// The components of a layout, if they have far fewer blocks: a function of the layout alone. Blocks count
/// whole, also where a component has fewer tokens than one.
pub(super) fn fewer_blocks<'a>(
    layout: &'a Layout,
    monitor: &Monitor<'_>,
) -> Result<Option<&'a Split>> {
    let blocks = |layout: &Layout| -> usize {
        layout.rows().flat_map(|row| layout.row(row)).map(|run| run.len as usize).sum()
    };
    let fewer = |split: &&Split| {
        let mut sum = 0;
        for component in split.components() {
            for own in component.layouts().chunk_by(|a, b| a.shares_blocks(b)) {
                sum += own.len() * blocks(&own[0]);
            }
        }
        FEWER * sum <= blocks(layout)
    };
    Ok(components(layout, monitor)?.filter(fewer))
}

/// The components of a layout, if it has any.
fn components<'a>(layout: &'a Layout, monitor: &Monitor<'_>) -> Result<Option<&'a Split>> {
    layout.split_with(|_, _| monitor.flow()).map_err(|error| match error {
        longspan_pattern::Error::Stopped { .. } => monitor.stopped_error(),
        other => Error::Pattern(other),
    })
}

/// What a layout costs per head, as predicted from its tiles. The choice between the order of tokens and
/// components is made by this prediction.
///
/// ```
/// use longspan::{Layout, Options, Prediction, Shape};
///
/// let shape = Shape::new(16_384, 16_384);
/// let strided = Layout::compile(&"strided(64)".parse()?, &shape)?;
/// let prediction = Prediction::of::<f32>(&strided, &Options::default())?;
/// assert!(prediction.split && prediction.relative_time < 0.05);
/// // One pair in 64, and all blocks.
/// let natural = Prediction::of::<f32>(&strided, &Options::default().split(false))?;
/// assert_eq!(natural.computed_pairs, 64 * prediction.computed_pairs);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Prediction {
    /// Whether it is computed as components.
    pub split: bool,
    /// Pairs of all blocks, masked ones included; kernels leave out some of those.
    pub computed_pairs: u128,
    /// The time of a forward pass relative to dense attention over the same tokens; 0 without tokens.
    pub relative_time: f64,
}

impl Prediction {
    /// The prediction for tensors of `E` with these options on this CPU.
    pub fn of<E: Element>(layout: &Layout, options: &Options) -> Result<Self> {
        let costs = Costs::of(E::TYPE, options)?;
        let split = chosen(options, E::TYPE, layout, &Monitor::new(Hook::none()))?;
        let (tiles, time) = match split {
            Some(split) => (*split.tiles(), costs.split(split.tiles())),
            None => {
                let tiles = TileCounts::of(layout);
                (tiles, costs.natural(&tiles))
            }
        };
        let queries = layout.queries().next_multiple_of(16) as u128;
        let full_pairs = queries * layout.keys() as u128;
        let dense = TileCounts { queries, full_pairs, calls: 1, ..TileCounts::default() };
        let dense = costs.natural(&dense);
        Ok(Prediction {
            split: split.is_some(),
            computed_pairs: tiles.full_pairs + tiles.partial_pairs,
            relative_time: if full_pairs == 0 { 0.0 } else { time / dense },
        })
    }
}
