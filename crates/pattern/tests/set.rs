//! Layouts per batch entry and head, and layouts from given blocks.

use std::ops::ControlFlow;
use std::sync::Arc;

use longspan_pattern::{
    BlockMasks, BlockSize, Blocks, Error, Heads, Layout, LayoutCache, LayoutSet, Padding, Pattern,
    Positions, RunKind, Shape, Tiles,
};

fn shape(tokens: usize) -> Shape {
    Shape::new(tokens, tokens)
}

fn refused(result: Result<impl std::fmt::Debug, Error>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn equal_layouts_are_stored_once() {
    // The third head is equivalent to the first; the last two entries have the same padding.
    let heads: Heads = "heads([causal, window(9, 0), window(99999, 0)])".parse().unwrap();
    let padding = Padding::Each(vec![0..700, 3..700, 0..650, 0..650]);
    let set = LayoutSet::compile(&heads, 3, &shape(700), &padding, None).unwrap();
    assert_eq!((set.batch(), set.heads()), (4, 3));
    for entry in 0..4 {
        assert!(std::ptr::eq(set.get(entry, 0), set.get(entry, 2)));
        assert!(!std::ptr::eq(set.get(entry, 0), set.get(entry, 1)));
    }
    assert!(std::ptr::eq(set.get(2, 1), set.get(3, 1)));
    assert_eq!(set.layouts().len(), 3 * 2);
    assert_eq!(set.bytes(), set.layouts().iter().map(|l| l.bytes()).sum::<usize>());
    let causal = |padding: u128| (700 - padding) * (701 - padding) / 2;
    assert_eq!(set.get(0, 0).counts().unwrap().active_pairs, causal(0));
    assert_eq!(set.get(1, 0).counts().unwrap().active_pairs, causal(3));
    assert_eq!(set.get(2, 0).counts().unwrap().active_pairs, causal(0) - causal(650));
}

#[test]
fn equal_pairs_at_other_positions_are_other_layouts() {
    let full = |offset| {
        let shape = Shape::new(3, 5).query_offset(offset);
        Arc::new(Layout::compile(&Pattern::full(), &shape).unwrap())
    };
    let packed = Pattern::packed([3], [5], Pattern::full()).unwrap();
    let packed = Arc::new(Layout::compile(&packed, &Shape::new(3, 5)).unwrap());
    let set = LayoutSet::new(4, 1, [full(2), full(7), full(2), packed]).unwrap();
    assert_eq!((0..4).map(|entry| set.index(entry, 0)).collect::<Vec<_>>(), [0, 1, 0, 2]);
}

#[test]
fn empty_batch_and_single_pattern() {
    let same: Heads = Pattern::causal().into();
    let none = LayoutSet::compile(&same, 8, &shape(100), &Padding::None(0), None).unwrap();
    assert_eq!(none.layouts().len(), 0);
    let cache = LayoutCache::new(1 << 20);
    let many = LayoutSet::compile(&same, 8, &shape(1000), &Padding::None(5), Some(&cache)).unwrap();
    assert_eq!(many.layouts().len(), 1);
    assert_eq!(cache.stats().misses, 1);
}

#[test]
fn mismatched_arguments_are_errors() {
    let heads: Heads = "heads([causal, full])".parse().unwrap();
    let compiled = LayoutSet::compile(&heads, 3, &shape(100), &Padding::None(1), None);
    assert_eq!(refused(compiled), "heads: 2 patterns for 3 query heads, expected one per head");
    let compile = |tokens| Arc::new(Layout::compile(&Pattern::full(), &shape(tokens)).unwrap());
    assert!(refused(LayoutSet::new(1, 2, [compile(10), compile(11)])).contains("all the same"));
    assert!(refused(LayoutSet::new(2, 2, [compile(10)])).contains("2 batch entries × 2 heads"));
    let padding = Padding::Each(std::iter::once(0..101).collect());
    let compiled = LayoutSet::compile(&heads, 2, &shape(100), &padding, None);
    assert_eq!(
        refused(compiled),
        "the keys of key_padding are 0..101, expected a range inside 0..100"
    );
    let padded = shape(100).key_padding(0..50);
    let padding = Padding::Each(std::iter::once(0..60).collect());
    let both = LayoutSet::compile(&heads, 2, &padded, &padding, None);
    assert!(refused(both).contains("expected only one of them"));
    let own = LayoutSet::compile(&heads, 2, &padded, &Padding::None(1), None).unwrap();
    assert_eq!(own.get(0, 1).counts().unwrap().active_pairs, 100 * 50);
}

#[test]
fn given_blocks_are_checked() {
    let shape = shape(40).block(BlockSize::new(16).unwrap());
    let blocks = |starts: &[usize], columns: &[u32]| {
        Layout::from_blocks(&shape, Blocks { starts, columns, masks: BlockMasks::Full })
    };
    assert!(blocks(&[0, 1, 2, 3], &[0, 1, 2]).is_ok());
    let wrong = [
        (&[0, 1, 2][..], &[0, 1][..], "3 row starts, expected 4"),
        (&[1, 1, 2, 3], &[0, 1, 2], "row starts run from 1 to 3, expected 0 to 3"),
        (&[0, 1, 2, 2], &[0, 1, 2], "row starts run from 0 to 2, expected 0 to 3"),
        (&[0, 3, 2, 3], &[0, 1, 2], "row 1 runs from block 3 to 2, expected ascending"),
        (&[0, 9, 9, 3], &[0, 1, 2], "row 0 runs from block 0 to 9, expected ascending"),
        (&[0, 2, 2, 2], &[1, 1], "row 0 has column 1, expected ascending columns below 3"),
        (&[0, 2, 2, 2], &[1, 0], "row 0 has column 0, expected ascending columns below 3"),
        (&[0, 1, 1, 1], &[3], "row 0 has column 3, expected ascending columns below 3"),
    ];
    for (starts, columns, message) in wrong {
        assert_eq!(refused(blocks(starts, columns)), format!("block layout: {message}"));
    }
    let none = Blocks { starts: &[0; 4], columns: &[], masks: BlockMasks::Full };
    let padded = shape.clone().key_padding(0..20);
    assert!(refused(Layout::from_blocks(&padded, none)).contains("maps and padding"));
    let budget = shape.clone().mask_bytes(0);
    assert!(refused(Layout::from_blocks(&budget, none)).contains("mask budget"));
    // Offsets say where tokens are.
    let moved = Layout::from_blocks(&shape.clone().query_offset(7).key_offset(5), none).unwrap();
    assert_eq!(moved.query_positions().get(0), Some(7));
    assert_eq!(moved.key_positions().get(0), Some(5));
}

#[test]
fn given_masks_are_checked_and_normalized() {
    // 20 tokens in blocks of 16: the second row and column have four.
    let shape = shape(20).block(BlockSize::new(16).unwrap());
    let blocks = |numbers: &[Option<u32>], words: &[u64]| {
        let masks = BlockMasks::Numbered { numbers, words };
        Layout::from_blocks(&shape, Blocks { starts: &[0, 2, 4], columns: &[0, 1, 0, 1], masks })
    };
    let full: Vec<u64> = vec![0xFFFF; 16];
    let corner: Vec<u64> = (0..16).map(|i| if i < 4 { 0xF } else { 0 }).collect();
    let words: Vec<u64> = [full, corner, vec![0; 16]].concat();
    let layout = blocks(&[Some(0), None, Some(2), Some(1)], &words).unwrap();
    assert_eq!(layout.row(0).len(), 1, "both are Full and adjacent");
    assert_eq!(layout.row(1).len(), 1, "the empty one is dropped");
    assert_eq!((layout.row(1)[0].start, layout.row(1)[0].kind()), (1, RunKind::Full));
    assert_eq!(layout.counts().unwrap().active_pairs, 16 * 20 + 4 * 4);

    let wrong = [
        (&[None; 3][..], "expected one mask number per block, 4 blocks"),
        (&[None, Some(3), None, None], "block (0, 1) has mask 3 of 3"),
        (&[None, Some(0), None, None], "has bits past its 16 queries and 4 keys"),
        (&[None, None, Some(0), None], "has bits past its 4 queries and 16 keys"),
    ];
    for (numbers, message) in wrong {
        let error = refused(blocks(numbers, &words));
        assert!(error.contains(message), "{error}");
    }
    let error = refused(blocks(&[None; 4], &words[1..]));
    assert_eq!(error, "block layout: 47 mask words, expected a multiple of 16");
}

#[test]
fn patterns_per_batch_entry() {
    let batch: Heads = "batch([causal, heads([causal, full]), window(9, 0)])".parse().unwrap();
    assert_eq!((batch.entries(), batch.count()), (Some(3), Some(2)));
    assert_eq!(batch.to_string().parse(), Ok(batch.clone()));
    let set = LayoutSet::compile(&batch, 2, &shape(100), &Padding::None(3), None).unwrap();
    let pairs = |entry, head| set.get(entry, head).counts().unwrap().active_pairs;
    assert_eq!([pairs(0, 0), pairs(0, 1), pairs(1, 0), pairs(1, 1)], [5050, 5050, 5050, 10_000]);
    assert_eq!([pairs(2, 0), pairs(2, 1)], [955, 955]);
    assert_eq!(set.layouts().len(), 3);
    // With padding of each entry.
    let padding = Padding::Each(vec![0..100, 0..50, 0..100]);
    let padded = LayoutSet::compile(&batch, 2, &shape(100), &padding, None).unwrap();
    assert_eq!(padded.get(1, 1).counts().unwrap().active_pairs, 5_000);
    assert_eq!(padded.get(2, 1).counts().unwrap().active_pairs, 955);

    let compiled = LayoutSet::compile(&batch, 2, &shape(100), &Padding::None(2), None);
    let expected = "layout set: patterns of 3 batch entries, expected those of 2";
    assert_eq!(refused(compiled), expected);
    assert!(refused(batch.get(0, 2)).contains("give that of an entry"));
    assert!(refused(Heads::batch([])).contains("expected a pattern per batch entry"));
    assert!(refused(Heads::batch([batch.clone()])).contains("batch([…]) inside of batch([…])"));
    let uneven = "batch([heads([causal, full]), heads([causal])])".parse::<Heads>();
    assert!(refused(uneven).contains("2 patterns for 1 query heads"));
    assert!(refused("causal & batch([full])".parse::<Heads>()).contains("must be outermost"));
}

#[test]
fn masks_are_layouts() {
    let mut random = longspan_testing::Random::new(5);
    for (queries, keys) in [(1, 1), (100, 100), (37, 211), (211, 37), (130, 129), (0, 9), (9, 0)] {
        for share in [0, 1, 50, 99, 100] {
            let mask: Vec<bool> = (0..queries * keys).map(|_| random.below(100) < share).collect();
            let shape = Shape::new(queries, keys).block(BlockSize::MIN);
            let layout = Layout::from_mask(&mask, shape).unwrap();
            let mut found = vec![false; queries * keys];
            let mut masks = layout.masks();
            for row in layout.rows() {
                for run in layout.row(row) {
                    for column in run.start..run.end() {
                        let words = masks.get(row, column, run);
                        for (index, word) in words.iter().enumerate() {
                            for bit in (0..16).filter(|bit| word >> bit & 1 == 1) {
                                let query = row as usize * 16 + index;
                                found[query * keys + column as usize * 16 + bit] = true;
                            }
                        }
                    }
                }
            }
            assert_eq!(found, mask, "{queries} × {keys}, {share} %");
            let pattern = layout.to_pattern().unwrap();
            let first = |positions: &Positions| positions.get(0).unwrap_or(0);
            let shape = Shape::new(queries, keys)
                .block(BlockSize::MIN)
                .query_offset(first(layout.query_positions()))
                .key_offset(first(layout.key_positions()));
            let compiled = Layout::compile(&pattern, &shape).unwrap();
            assert!(compiled.same_pairs(&layout).unwrap(), "{queries} × {keys}, {share} %");
        }
    }
    let wrong = Layout::from_mask(&[true; 5], Shape::new(2, 3));
    assert_eq!(refused(wrong), "mask: 5 pairs, expected 2 queries × 3 keys");
}

/// Distances of score additions are those of a pattern: the queries are the last positions.
#[test]
fn masks_have_the_positions_of_patterns() {
    for (queries, keys) in [(40, 100), (100, 40)] {
        let aligned = keys as i64 - queries as i64;
        let active = |pair: usize| (pair % keys) as i64 <= (pair / keys) as i64 + aligned;
        let mask: Vec<bool> = (0..queries * keys).map(active).collect();
        let layout = Layout::from_mask(&mask, Shape::new(queries, keys)).unwrap();
        let first_query = layout.query_positions().get(0).unwrap();
        assert_eq!(first_query - layout.key_positions().get(0).unwrap(), aligned);
        let causal = Layout::compile(&Pattern::causal(), &Shape::new(queries, keys)).unwrap();
        assert!(layout.same_pairs(&causal).unwrap());
    }
}

/// Tiles of any size, aligned with blocks or not, make the layout of their mask.
#[test]
fn tiles_are_layouts() {
    let mut random = longspan_testing::Random::new(6);
    for case in 0..400 {
        let (queries, keys) = (1 + random.below(150) as usize, 1 + random.below(150) as usize);
        let size = match case % 4 {
            0 => (16, 32),
            1 => (64, 64),
            _ => (1 + random.below(90) as usize, 1 + random.below(90) as usize),
        };
        let block = BlockSize::new([16, 17, 64, 128][random.below(4) as usize]).unwrap();
        let mut mask = vec![false; queries * keys];
        let (mut starts, mut columns) = (vec![0], Vec::new());
        let (mut numbers, mut masks) = (Vec::new(), Vec::<u8>::new());
        for row in 0..queries.div_ceil(size.0) {
            for column in 0..keys.div_ceil(size.1) {
                if random.below(3) == 0 {
                    continue;
                }
                let full = random.below(2) == 0;
                columns.push(column as u32);
                numbers.push((!full).then_some((masks.len() / (size.0 * size.1)) as u32));
                for query in 0..size.0 {
                    for key in 0..size.1 {
                        // Pairs past the last token have any value, and all but 0 is active.
                        let active = random.below(3);
                        if !full {
                            masks.push([0, 1, 255][active as usize]);
                        }
                        let (query, key) = (row * size.0 + query, column * size.1 + key);
                        if query < queries && key < keys {
                            mask[query * keys + key] = full || active != 0;
                        }
                    }
                }
            }
            starts.push(columns.len());
        }
        let (starts, columns, numbers) = (&starts[..], &columns[..], &numbers[..]);
        let tiles = Tiles { size, starts, columns, numbers, masks: &masks[..] };
        let shape = Shape::new(queries, keys).block(block);
        let layout = Layout::from_tiles(&shape, tiles).unwrap();
        let whole = Layout::from_mask(&mask, shape).unwrap();
        assert!(layout.same_pairs(&whole).unwrap(), "case {case}: {queries} × {keys}, {size:?}");
    }
}

#[test]
fn given_tiles_are_checked() {
    let shape = Shape::new(40, 30);
    let tiles = |size, starts: &[usize], columns: &[u32], numbers: &[Option<u32>]| {
        let tiles = Tiles { size, starts, columns, numbers, masks: &[true; 800] };
        Layout::from_tiles(&shape, tiles)
    };
    assert!(tiles((20, 20), &[0, 1, 3], &[0, 0, 1], &[None, Some(0), Some(1)]).is_ok());
    assert!(tiles((usize::MAX, usize::MAX), &[0, 1], &[0], &[None]).is_ok());
    let wrong = [
        (tiles((0, 20), &[0], &[], &[]), "tiles of 0 × 20 pairs, expected at least 1 × 1"),
        (tiles((20, 20), &[0, 0], &[], &[]), "2 starts of rows of tiles, expected 3"),
        (tiles((20, 20), &[0, 2, 1], &[0], &[None]), "expected ascending from 0 to 1"),
        (tiles((20, 20), &[0, 0, 1], &[0], &[]), "0 mask numbers for 1 tiles"),
        (tiles((20, 20), &[0, 0, 1], &[0], &[Some(2)]), "a tile has mask 2 of 2"),
        (tiles((usize::MAX, 2), &[0, 1], &[0], &[Some(0)]), "a tile has mask 0 of 0"),
        (tiles((20, 20), &[0, 0, 1], &[2], &[None]), "[2], expected ascending ones below 2"),
        (tiles((20, 20), &[0, 0, 2], &[1, 1], &[None; 2]), "[1, 1], expected ascending"),
    ];
    for (layout, message) in wrong {
        let error = refused(layout);
        assert!(error.contains(message), "{error}");
    }
    let stopped = Layout::from_mask_with(&[true; 1200], shape, |_, _| ControlFlow::Break(()));
    assert_eq!(stopped.unwrap_err(), Error::Stopped { row: 0, rows: 1 });
}
