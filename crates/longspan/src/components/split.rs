//! Layouts as components: terms that are dense in an order of residues, as calls of their own.

use std::sync::Arc;

use longspan_pattern::{Layout, PositionOrder, Split, TileCounts, TokenSteps};

use super::{Component, HeadMap, Part, Place};
use crate::dims::Sizes;
use crate::dtype::ElementType;
use crate::error::{Error, Result};
use crate::exec::Monitor;
use crate::isa::Isa;
use crate::layouts::Layouts;
use crate::options::Options;
use crate::tensor::Selection;

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
    /// Measured with `strided` and `dilated` patterns on the instruction sets of x86-64; others are like
    /// those.
    fn of(dtype: ElementType, isa: Isa, options: &Options) -> Self {
        let types = options.precision.compute_types(dtype, isa);
        match types.multiplied {
            ElementType::F32 => Costs { partial: 1.1, query: 40.0, state: 130.0, call: 20_000.0 },
            _ => Costs { partial: 1.5, query: 100.0, state: 400.0, call: 60_000.0 },
        }
    }

    fn natural(&self, tiles: &TileCounts) -> f64 {
        self.blocks(tiles) + self.query * tiles.queries as f64
    }

    fn split(&self, tiles: &TileCounts) -> f64 {
        self.blocks(tiles) + self.state * tiles.queries as f64
    }

    fn blocks(&self, tiles: &TileCounts) -> f64 {
        let TileCounts { full_pairs, partial_pairs, calls, .. } = *tiles;
        full_pairs as f64 + self.partial * partial_pairs as f64 + self.call * calls as f64
    }
}

/// The components of layouts, where any of them is faster that way: see [`Options::split`]. `None` where
/// all are computed as they are.
pub(crate) fn split(
    options: &Options,
    dtype: ElementType,
    layouts: &Layouts,
    sizes: &Sizes,
    monitor: &Monitor<'_>,
) -> Result<Option<Vec<Component>>> {
    let &Sizes { batch, heads, key_heads, .. } = sizes;
    if options.uniform || options.split == Some(false) || batch * heads * key_heads == 0 {
        return Ok(None);
    }
    let mut splits: Vec<Option<&Split>> = Vec::with_capacity(1);
    for layout in layouts.distinct() {
        let split = layout.split_with(|_, _| monitor.flow()).map_err(|error| match error {
            longspan_pattern::Error::Stopped { .. } => monitor.stopped_error(),
            other => Error::Pattern(other),
        })?;
        splits.push(match split {
            Some(split) if options.split == Some(true) => Some(split),
            Some(split) => {
                let costs = Costs::of(dtype, Isa::choose(options.isa)?, options);
                let faster = costs.split(split.tiles()) < costs.natural(split.natural_tiles());
                faster.then_some(split)
            }
            None => None,
        });
    }
    if splits.iter().all(Option::is_none) {
        return Ok(None);
    }
    let mut list = Vec::new();
    if let Some(layouts) = natural(layouts, &splits)? {
        let tiles = |split: &Option<&Split>| split.map_or(1, |split| weight(split.natural_tiles()));
        let weight = splits.iter().map(tiles).sum::<usize>() * heads;
        list.push(Component { layouts, part: Part::All, weight, place: None });
    }
    let map = HeadMap::all(heads, key_heads);
    let same = (1..batch)
        .all(|entry| (0..heads).all(|head| layouts.index(entry, head) == layouts.index(0, head)));
    for entry in 0..if same { 1 } else { batch } {
        let place = (!same).then_some(Place { entry, sequence: entry });
        for (index, split) in splits.iter().enumerate() {
            let Some(split) = split else { continue };
            for (query_heads, key_heads) in map.calls(|head| layouts.index(entry, head) == index) {
                for component in split.components() {
                    if component.order() == PositionOrder::Natural {
                        continue;
                    }
                    let select = |TokenSteps { segments, tokens }, heads| Selection {
                        entry: 0,
                        segments,
                        tokens,
                        heads,
                    };
                    list.push(Component {
                        layouts: longspan_pattern::LayoutSet::per_entry(
                            query_heads.count,
                            component.layouts().to_vec(),
                        )?
                        .into(),
                        part: Part::Some {
                            queries: select(component.queries(), query_heads),
                            keys: select(component.keys(), key_heads),
                        },
                        weight: weight(component.tiles()) * query_heads.count,
                        place,
                    });
                }
            }
        }
    }
    Ok(Some(list))
}

fn weight(tiles: &TileCounts) -> usize {
    ((tiles.full_pairs + tiles.partial_pairs) / 4_096) as usize + 1
}

/// What is computed in natural order: layouts that are not split, and the rest of those that are. `None` if
/// there is nothing.
fn natural(layouts: &Layouts, splits: &[Option<&Split>]) -> Result<Option<Layouts>> {
    let own = |split: &Split| {
        let first = split.components().first();
        let natural = first.filter(|component| component.order() == PositionOrder::Natural);
        natural.map(|component| component.layouts()[0].clone())
    };
    if splits.iter().all(|split| split.is_some_and(|split| own(split).is_none())) {
        return Ok(None);
    }
    let mut splits = splits.iter();
    let mut rest = |layout: &Arc<Layout>| {
        let Some(split) = splits.next().expect("one per layout") else { return Ok(layout.clone()) };
        match own(split) {
            Some(own) => Ok(own),
            None => Ok(Arc::new(layout.keep_blocks(&vec![0; layout.rows().len() + 1], &[])?)),
        }
    };
    Ok(Some(match layouts {
        Layouts::One(layout) => rest(layout)?.into(),
        Layouts::Each(set) => set.map(rest)?.into(),
    }))
}
