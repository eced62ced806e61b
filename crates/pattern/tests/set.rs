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
