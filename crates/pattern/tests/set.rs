//! Layouts per batch entry and head, and layouts from given blocks.

use std::sync::Arc;

use longspan_pattern::{
    BlockMasks, BlockSize, Blocks, Error, Heads, Layout, LayoutCache, LayoutSet, Padding, Pattern,
    RunKind, Shape,
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
    assert_eq!(set.bytes(), set.layouts().iter().map(|l| l.bytes()).sum());
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
    let moved = Blocks { starts: &[0; 4], columns: &[], masks: BlockMasks::Full };
    assert!(refused(Layout::from_blocks(&shape.clone().key_offset(1), moved)).contains("offsets"));
    let budget = shape.clone().mask_bytes(0);
    assert!(refused(Layout::from_blocks(&budget, moved)).contains("mask budget"));
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
        let (_, first_query, first_key) = Pattern::from_mask(&mask, queries, keys).unwrap();
        assert_eq!(first_query - first_key, aligned);
        let layout = Layout::from_mask(&mask, Shape::new(queries, keys)).unwrap();
        let causal = Layout::compile(&Pattern::causal(), &Shape::new(queries, keys)).unwrap();
        assert!(layout.same_pairs(&causal).unwrap());
    }
}
