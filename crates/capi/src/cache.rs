//! Decoding over keys and values of earlier tokens.

use std::ffi::c_char;

use longspan::{Dims, Inputs, KvCache, OutputMut};

use crate::hook::{self, Hook};
use crate::layout::{free, give, handle, heads};
use crate::options::{self, Options};
use crate::status::{Result, Status, call, invalid};
use crate::tensor::{self, Named, Tensor, list, with_element};

/// Keys and values of the tokens so far.
pub struct Cache {
    cache: KvCache,
}

/// An empty cache. Slots for `capacity` tokens are taken with the first ones; 0 leaves that to the library.
/// `options` may be null. Release it with `longspan_cache_free`.
///
/// # Safety
///
/// `pattern` ends with a zero, `options` and what they point to may be read, `cache` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_cache_create(
    pattern: *const c_char,
    options: *const Options,
    capacity: usize,
    cache: *mut *mut Cache,
) -> Status {
    call(|| {
        let make = || {
            // SAFETY: as this function demands.
            let (patterns, options) =
                unsafe { (heads("pattern", pattern)?, options::read(options)?) };
            Ok(Cache { cache: KvCache::new(patterns).capacity(capacity).options(options) })
        };
        // SAFETY: as this function demands.
        unsafe { give("cache", cache, make) }
    })
}

/// Releases a cache. Null is nothing.
///
/// # Safety
///
/// `cache` is null, or a handle that was not freed, which nothing uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_cache_free(cache: *mut Cache) {
    // SAFETY: as this function demands.
    unsafe { free(cache) };
}

/// Appends keys and values, and attends with the queries of the same tokens: as `longspan_forward` writes it.
/// Of batch entry `b` the first `lengths[b]` tokens count, all where `lengths` is null. `lse` and `hook` may
/// be null. After an error the cache is what it was before.
///
/// # Safety
///
/// `cache` is a handle that nothing else uses meanwhile; elements of tensors may be read, those of `out` and
/// `lse` written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_cache_step(
    cache: *mut Cache,
    q: *const Tensor,
    k: *const Tensor,
    v: *const Tensor,
    lengths: *const usize,
    out: *const Tensor,
    lse: *mut f32,
    hook: *const Hook,
) -> Status {
    call(|| {
        // SAFETY: as this function demands.
        let (cache, mut ask) = unsafe { (exclusive(cache)?, Hook::read(hook)?) };
        // SAFETY: as this function demands.
        let (q, k, v, out) = unsafe {
            (
                Named::read("q", q)?,
                Named::read("k", k)?,
                Named::read("v", v)?,
                Named::read("out", out)?,
            )
        };
        for tensor in [&k, &v, &out] {
            tensor.same_dtype(&q)?;
        }
        let rows = Dims { dim: v.dims.dim, ..q.dims };
        // SAFETY: as this function demands.
        let (lse, lengths) =
            unsafe { (tensor::rows_mut("lse", lse, rows)?, of_entries(lengths, q.dims.batch)?) };
        let mut own = Vec::new();
        let mut between = hook::between(&mut ask);
        let hook = longspan::Hook::new(&mut between);
        with_element!(q.dtype(), E => {
            // SAFETY: as this function demands.
            let (inputs, out) =
                unsafe { (Inputs::<E>::new(q.view()?, k.view()?, v.view()?), out.view_mut()?) };
            let lse = tensor::or_own(lse, &mut own, rows)?;
            cache.step_into(inputs, lengths, OutputMut { out, lse, lse_lo: None }, hook)?;
        });
        Ok(())
    })
}

/// Appends keys and values; no query attends yet. `lengths` as for `longspan_cache_step`.
///
/// # Safety
///
/// As for `longspan_cache_step`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_cache_append(
    cache: *mut Cache,
    k: *const Tensor,
    v: *const Tensor,
    lengths: *const usize,
) -> Status {
    call(|| {
        // SAFETY: as this function demands.
        let (cache, k, v) =
            unsafe { (exclusive(cache)?, Named::read("k", k)?, Named::read("v", v)?) };
        v.same_dtype(&k)?;
        // SAFETY: as this function demands.
        let lengths = unsafe { of_entries(lengths, k.dims.batch) }?;
        with_element!(k.dtype(), E => {
            // SAFETY: as this function demands.
            let (k, v) = unsafe { (k.view::<E>()?, v.view::<E>()?) };
            match lengths {
                Some(lengths) => cache.append_ragged(k, v, lengths)?,
                None => cache.append(k, v)?,
            }
        });
        Ok(())
    })
}

/// Writes to `tokens` how many a batch entry has; 0 before the first keys.
///
/// # Safety
///
/// `cache` is a handle, `tokens` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_cache_length(
    cache: *const Cache,
    entry: usize,
    tokens: *mut u64,
) -> Status {
    call(|| {
        // SAFETY: as this function demands.
        let (cache, tokens) = unsafe { (&handle("cache", cache)?.cache, tokens.as_mut()) };
        let tokens = tokens.ok_or_else(|| invalid("tokens is null, expected a place"))?;
        *tokens = match cache.batch() {
            0 => 0,
            _ => cache.len(checked(cache, entry)?) as u64,
        };
        Ok(())
    })
}

/// Forgets the tokens of a batch entry, for another sequence in its place.
///
/// # Safety
///
/// `cache` is a handle that nothing else uses meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_cache_clear(cache: *mut Cache, entry: usize) -> Status {
    call(|| {
        // SAFETY: as this function demands.
        let cache = unsafe { exclusive(cache) }?;
        let entry = checked(cache, entry)?;
        cache.clear(entry);
        Ok(())
    })
}

fn checked(cache: &KvCache, entry: usize) -> Result<usize> {
    if entry < cache.batch() {
        return Ok(entry);
    }
    Err(invalid(format!(
        "entry is {entry}, expected one below {}, the batch entries",
        cache.batch()
    )))
}

/// # Safety
///
/// The pointer is null, or a handle that nothing else uses for `'a`.
unsafe fn exclusive<'a>(cache: *mut Cache) -> Result<&'a mut KvCache> {
    // SAFETY: as this function demands.
    let cache =
        unsafe { cache.as_mut() }.ok_or_else(|| invalid("cache is null, expected a handle"))?;
    Ok(&mut cache.cache)
}

/// # Safety
///
/// The pointer is null, or a number per batch entry may be read there for `'a`.
unsafe fn of_entries<'a>(lengths: *const usize, batch: usize) -> Result<Option<&'a [usize]>> {
    let count = if lengths.is_null() { 0 } else { batch };
    // SAFETY: as this function demands.
    unsafe { list("lengths", lengths, count) }
}
