//! Layouts: the text of a pattern, or a mask of pairs, for given lengths.

use std::ffi::{CStr, c_char};

use longspan::{BlockSize, Heads, LayoutSet, Layouts, Padding};

use crate::hook::Hook;
use crate::sized::{self, Sized};
use crate::status::{Failure, Result, Status, call, invalid};
use crate::tensor::list;

/// What a layout is made for. Begin with `LONGSPAN_SHAPE_INIT`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Shape {
    /// `sizeof(longspan_shape)`.
    pub size: usize,
    /// Queries.
    pub tokens_q: usize,
    /// Keys.
    pub tokens_k: usize,
    /// Batch entries; 0 where the layout is the same for all, however many there are.
    pub batch: usize,
    /// Query heads; 0 where the layout is the same for all, however many there are. Needed with
    /// `heads([…])`, and wherever `batch` is not 0.
    pub heads: usize,
    /// Query `i` has position `i + query_offset`; where null the queries are the last positions.
    pub query_offset: *const i64,
    /// Key `j` has position `j + key_offset`.
    pub key_offset: i64,
    /// The first and the end of the keys that are tokens, a pair per batch entry; null where all are.
    pub key_padding: *const usize,
    /// Tokens per block, 16 to 256; 0 leaves it to the library.
    pub block: usize,
}

// SAFETY: `repr(C)`, the size first, and numbers and pointers, for which zeros are valid.
unsafe impl Sized for Shape {
    const NAME: &'static str = "longspan_shape";
    const FIRST: usize = 72;
}

/// Which keys each query attends to, as blocks.
pub struct Layout {
    pub(crate) layouts: Layouts,
}

/// Numbers of a layout, summed over the batch entries and heads that it is for.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LayoutInfo {
    /// `sizeof(longspan_layout_info)`.
    pub size: usize,
    /// Queries.
    pub tokens_q: u64,
    /// Keys.
    pub tokens_k: u64,
    /// Tokens per block.
    pub block: u64,
    /// Batch entries; 0 for any.
    pub batch: u64,
    /// Query heads; 0 for any.
    pub heads: u64,
    /// Blocks with at least one active pair.
    pub active_blocks: u64,
    /// Pairs of a query and a key that it attends to.
    pub active_pairs: u64,
    /// Bytes of the distinct layouts.
    pub bytes: u64,
}

// SAFETY: `repr(C)`, the size first, and numbers, for which zeros are valid.
unsafe impl Sized for LayoutInfo {
    const NAME: &'static str = "longspan_layout_info";
    const FIRST: usize = 72;
}

/// A text of the caller.
///
/// # Safety
///
/// The pointer is null, or a text that ends with a zero may be read there for `'a`.
pub(crate) unsafe fn text<'a>(name: &str, pointer: *const c_char) -> Result<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: as this function demands.
    match unsafe { CStr::from_ptr(pointer) }.to_str() {
        Ok(text) => Ok(Some(text)),
        Err(_) => Err(invalid(format!("{name} is not UTF-8"))),
    }
}

/// The patterns of a text that has to be there.
///
/// # Safety
///
/// As of [`text`].
pub(crate) unsafe fn heads(name: &str, pointer: *const c_char) -> Result<Heads> {
    // SAFETY: as this function demands.
    let Some(text) = unsafe { text(name, pointer) }? else {
        return Err(invalid(format!("{name} is null, expected a pattern, as \"causal\"")));
    };
    let parsed: std::result::Result<Heads, longspan_pattern::Error> = text.parse();
    parsed.map_err(Failure::from)
}

/// Where a handle is written to.
///
/// # Safety
///
/// The pointer is null, or a handle may be written there.
pub(crate) unsafe fn give<T>(
    name: &str,
    into: *mut *mut T,
    make: impl FnOnce() -> Result<T>,
) -> Result<()> {
    if into.is_null() || !into.is_aligned() {
        return Err(invalid(format!(
            "the place of the new {name} is null, expected a pointer to a handle"
        )));
    }
    // SAFETY: as this function demands.
    unsafe { into.write(std::ptr::null_mut()) };
    let made = Box::into_raw(Box::new(make()?));
    // SAFETY: as above.
    unsafe { into.write(made) };
    Ok(())
}

/// A handle that has to be there.
///
/// # Safety
///
/// The pointer is null, or a handle of this library that was not freed.
pub(crate) unsafe fn handle<'a, T>(name: &str, pointer: *const T) -> Result<&'a T> {
    // SAFETY: as this function demands.
    unsafe { pointer.as_ref() }.ok_or_else(|| invalid(format!("{name} is null, expected a handle")))
}

/// Batch entries × heads of a layout at most: each takes some words of memory.
const MAX_ENTRIES: usize = 1 << 24;

struct Resolved {
    shape: longspan::Shape,
    /// Batch entries and heads that the layout is for; `None` for any.
    of_each: Option<(usize, usize)>,
    padding: Padding,
}

/// # Safety
///
/// What the shape points to may be read.
unsafe fn resolve(shape: &Shape, differs: bool) -> Result<Resolved> {
    let Shape { batch, heads, tokens_q, tokens_k, .. } = *shape;
    let padded = !shape.key_padding.is_null();
    let differs = differs || padded || batch != 0 || heads != 0;
    if differs && (batch == 0 || heads == 0) {
        return Err(invalid(format!(
            "shape.batch is {batch} and shape.heads is {heads}, expected the batch entries and query heads \
             of calls: the layout differs by one of them (or leave both 0)"
        )));
    }
    if batch.checked_mul(heads).is_none_or(|entries| entries > MAX_ENTRIES) {
        let message = format!(
            "shape.batch × shape.heads is {batch} × {heads}, expected at most 2^24: a layout that is the \
             same for all has 0 of both"
        );
        return Err(Failure::new(Status::TooLarge, message));
    }
    let mut resolved = longspan::Shape::new(tokens_q, tokens_k).key_offset(shape.key_offset);
    // SAFETY: as this function demands.
    if let Some(offset) = unsafe { shape.query_offset.as_ref() } {
        resolved = resolved.query_offset(*offset);
    }
    if shape.block != 0 {
        resolved = resolved.block(BlockSize::new(shape.block as u64)?);
    }
    let mut padding = Padding::None(batch.max(1));
    if padded {
        // SAFETY: as this function demands: two per batch entry.
        let bounds =
            unsafe { list("key_padding", shape.key_padding, 2 * batch) }?.unwrap_or_default();
        for (entry, pair) in bounds.as_chunks::<2>().0.iter().enumerate() {
            if pair[0] > pair[1] || pair[1] > tokens_k {
                return Err(invalid(format!(
                    "key_padding of batch entry {entry} is {} to {}, expected an ascending range within \
                     {tokens_k} keys",
                    pair[0], pair[1]
                )));
            }
        }
        padding = Padding::Each(bounds.as_chunks::<2>().0.iter().map(|&[a, b]| a..b).collect());
    }
    Ok(Resolved { shape: resolved, of_each: differs.then_some((batch, heads)), padding })
}

/// Compiles a pattern for a shape. `hook` may be null. Release the layout with `longspan_layout_free`.
///
/// # Safety
///
/// `pattern` ends with a zero, `shape` and what it points to may be read, `layout` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_layout_compile(
    pattern: *const c_char,
    shape: *const Shape,
    hook: *const Hook,
    layout: *mut *mut Layout,
) -> Status {
    call(|| {
        let make = || {
            // SAFETY: as this function demands.
            let (patterns, shape, mut ask) =
                unsafe { (heads("pattern", pattern)?, sized::required(shape)?, Hook::read(hook)?) };
            let differs = patterns.count().is_some() || patterns.entries().is_some();
            // SAFETY: as this function demands.
            let Resolved { shape, of_each, padding } = unsafe { resolve(&shape, differs) }?;
            let layouts = match (of_each, &patterns) {
                (None, Heads::Same(pattern)) => {
                    Layouts::from(longspan::Layout::compile_with(pattern, &shape, ask)?)
                }
                (of_each, _) => {
                    let (_, heads) = of_each.unwrap_or((1, 1));
                    let set = LayoutSet::compile_with(
                        &patterns, heads, &shape, &padding, None, &mut ask,
                    )?;
                    Layouts::from(set)
                }
            };
            Ok(Layout { layouts })
        };
        // SAFETY: as this function demands.
        unsafe { give("layout", layout, make) }
    })
}

/// The layout of the pairs whose byte is not 0 in `mask`, `[batch or 1, heads or 1, tokens_q, tokens_k]`. The
/// queries are the last positions: the shape has no offsets and no padding. `hook` may be null.
///
/// # Safety
///
/// As for `longspan_layout_compile`; so many bytes may be read at `mask`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_layout_from_mask(
    mask: *const u8,
    shape: *const Shape,
    hook: *const Hook,
    layout: *mut *mut Layout,
) -> Status {
    call(|| {
        let make = || {
            // SAFETY: as this function demands.
            let (shape, mut ask) = unsafe { (sized::required(shape)?, Hook::read(hook)?) };
            if !shape.query_offset.is_null()
                || shape.key_offset != 0
                || !shape.key_padding.is_null()
            {
                return Err(invalid(
                    "the shape of a mask has offsets or key_padding, expected none: the mask says which pairs \
                     there are",
                ));
            }
            // SAFETY: as this function demands.
            let Resolved { shape: resolved, of_each, .. } = unsafe { resolve(&shape, false) }?;
            let (batch, heads) = of_each.unwrap_or((1, 1));
            let pairs = shape.tokens_q.checked_mul(shape.tokens_k);
            let all = pairs.and_then(|pairs| pairs.checked_mul(batch.checked_mul(heads)?));
            let (Some(pairs), Some(all)) = (pairs, all) else {
                return Err(Failure::new(
                    Status::TooLarge,
                    "the pairs of the mask can't be counted",
                ));
            };
            if mask.is_null() && all > 0 {
                return Err(invalid(format!("mask is null, expected {all} bytes")));
            }
            // SAFETY: as this function demands.
            let active = unsafe { list("mask", mask, all) }?.unwrap_or_default();
            let mut each = Vec::with_capacity(batch * heads);
            for number in 0..batch * heads {
                let own = &active[number * pairs..][..pairs];
                let made = longspan::Layout::from_mask_with(own, resolved.clone(), &mut ask)?;
                each.push(std::sync::Arc::new(made));
            }
            let layouts = match of_each {
                None => Layouts::from(each.remove(0)),
                Some(_) => Layouts::from(LayoutSet::new_with(batch, heads, each, &mut ask)?),
            };
            Ok(Layout { layouts })
        };
        // SAFETY: as this function demands.
        unsafe { give("layout", layout, make) }
    })
}

/// Writes the numbers of a layout to `info`, whose `size` is set.
///
/// # Safety
///
/// `layout` is a handle, `info` may be read and written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_layout_get_info(
    layout: *const Layout,
    info: *mut LayoutInfo,
) -> Status {
    call(|| {
        // SAFETY: as this function demands.
        let (layout, asked) =
            unsafe { (handle("layout", layout)?, sized::required(info.cast_const())?) };
        let count = |number: u128| u64::try_from(number).unwrap_or(u64::MAX);
        let (batch, heads, all): (_, _, Vec<&longspan::Layout>) = match &layout.layouts {
            Layouts::One(layout) => (0, 0, vec![layout]),
            Layouts::Each(set) => {
                let pairs = (0..set.batch()).flat_map(|b| (0..set.heads()).map(move |h| (b, h)));
                (set.batch(), set.heads(), pairs.map(|(b, h)| set.get(b, h)).collect())
            }
        };
        let distinct: &[std::sync::Arc<longspan::Layout>] = match &layout.layouts {
            Layouts::One(layout) => std::slice::from_ref(layout),
            Layouts::Each(set) => set.layouts(),
        };
        let (mut blocks, mut pairs) = (0, 0);
        for layout in &all {
            let counts = layout.counts()?;
            blocks += counts.active_blocks();
            pairs += counts.active_pairs;
        }
        let first = all.first();
        let written = LayoutInfo {
            size: asked.size,
            tokens_q: first.map_or(0, |layout| layout.queries() as u64),
            tokens_k: first.map_or(0, |layout| layout.keys() as u64),
            block: first.map_or(0, |layout| layout.block().get() as u64),
            batch: batch as u64,
            heads: heads as u64,
            active_blocks: count(blocks),
            active_pairs: count(pairs),
            bytes: distinct.iter().map(|layout| layout.bytes() as u64).sum(),
        };
        let bytes = asked.size.min(size_of::<LayoutInfo>());
        // SAFETY: the caller's struct has `size` bytes, as its first field says.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const written).cast::<u8>(), info.cast(), bytes);
        }
        Ok(())
    })
}

/// Releases a layout; attention that was made with it keeps what it needs. Null is nothing.
///
/// # Safety
///
/// `layout` is null, or a handle that was not freed, which nothing uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_layout_free(layout: *mut Layout) {
    // SAFETY: as this function demands.
    unsafe { free(layout) };
}

/// # Safety
///
/// The pointer is null, or came from `Box::into_raw` and was not freed.
pub(crate) unsafe fn free<T>(pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: as this function demands.
        let owned = unsafe { Box::from_raw(pointer) };
        let dropped = call(|| {
            drop(owned);
            Ok(())
        });
        debug_assert_eq!(dropped, Status::Ok);
    }
}
