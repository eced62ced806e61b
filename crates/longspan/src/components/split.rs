//! Layouts as components: terms that are dense in an order of residues, as calls of their own.

use std::sync::Arc;

use longspan_pattern::{Layout, LayoutSet, PositionOrder, Split, TileCounts, TokenSteps};

use super::cost::{chosen, fewer_blocks};
use super::{Component, HeadMap, Kept, List, Part, Place};
use crate::dims::Sizes;
use crate::dtype::ElementType;
use crate::error::Result;
use crate::exec::Monitor;
use crate::isa::Isa;
use crate::layouts::Layouts;
use crate::options::Options;
use crate::precision::Precision;
use crate::tensor::Selection;

/// What the components of given layouts depend on.
pub(crate) type SplitKey =
    ((usize, usize, usize), ElementType, Option<Isa>, Precision, Option<bool>);

/// The components of layouts, where any of them is faster that way: see [`Options::split`]. `None` where
/// all are computed as they are.
pub(crate) fn split(
    options: &Options,
    dtype: ElementType,
    layouts: &Layouts,
    sizes: &Sizes,
    kept: &Kept<SplitKey>,
    monitor: &Monitor<'_>,
) -> Result<Option<Arc<List>>> {
    let &Sizes { batch, heads, key_heads, .. } = sizes;
    if batch * heads * key_heads == 0 {
        return Ok(None);
    }
    // Most calls end here, without an allocation.
    let mut any = false;
    for layout in layouts.distinct() {
        any |= chosen(options, dtype, layout, monitor)?.is_some();
    }
    if !any {
        return Ok(None);
    }
    let key = ((batch, heads, key_heads), dtype, options.isa, options.precision, options.split);
    let make = || {
        let splits = layouts.distinct().iter();
        let splits = splits.map(|layout| chosen(options, dtype, layout, monitor));
        let splits: Vec<_> = splits.collect::<Result<_>>()?;
        Ok(List::new(list(layouts, sizes, &splits)?, sizes))
    };
    kept.get_or_make(key, make).map(Some)
}

/// The components of layouts, where those of any of them have far fewer blocks: for engines that compute all
/// pairs of these.
pub(super) fn split_by_blocks(
    layouts: &Layouts,
    sizes: &Sizes,
    monitor: &Monitor<'_>,
) -> Result<Option<Vec<Component>>> {
    let splits = layouts.distinct().iter().map(|layout| fewer_blocks(layout, monitor));
    let splits: Vec<_> = splits.collect::<Result<_>>()?;
    let any = splits.iter().any(Option::is_some);
    any.then(|| list(layouts, sizes, &splits)).transpose()
}

/// The calls of layouts, some of which are split.
fn list(layouts: &Layouts, sizes: &Sizes, splits: &[Option<&Split>]) -> Result<Vec<Component>> {
    let &Sizes { batch, heads, key_heads, .. } = sizes;
    let mut list = Vec::new();
    if let Some(layouts) = natural(layouts, splits)? {
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
                        layouts: LayoutSet::per_entry(
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
    Ok(list)
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

#[cfg(test)]
mod tests {
    use longspan_pattern::{Heads, Padding, Shape};

    use super::*;
    use crate::exec::Hook;

    #[test]
    fn rows_of_several_components_have_a_state() {
        for (text, tokens, components, disjoint) in [
            ("strided(8)", 64, 1, true),
            // Views of eight and of seven tokens.
            ("strided(8)", 61, 2, true),
            ("dilated(16, 4, 0) | dilated(16, 4, 1)", 64, 2, true),
            ("heads([strided(8), strided(4)])", 64, 2, true),
            ("strided(8) | window(2, 2)", 64, 2, false),
            ("strided(8) | strided(12)", 48, 2, false),
            ("heads([strided(8), strided(8) | window(2, 2)])", 64, 3, false),
        ] {
            let patterns: Heads = text.parse().unwrap();
            let (heads, shape) = (2, Shape::new(tokens, tokens));
            let set = LayoutSet::compile(&patterns, heads, &shape, &Padding::None(1), None);
            let layouts = Layouts::from(set.unwrap());
            let options = Options::default().split(true);
            let sizes = Sizes {
                batch: 1,
                queries: tokens,
                keys: tokens,
                heads,
                key_heads: heads,
                dim: 4,
                value_dim: 4,
            };
            let (kept, monitor) = (Kept::default(), Monitor::new(Hook::none()));
            let list = split(&options, ElementType::F32, &layouts, &sizes, &kept, &monitor);
            let list = list.unwrap().unwrap();
            assert_eq!((list.len(), list.disjoint), (components, disjoint), "{text}, {tokens}");
        }
    }
}
