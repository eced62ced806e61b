//! Attention over a layout, and LongNet's dilated attention: forward, backward, merge.

use std::ffi::c_char;

use longspan::{
    Dilated, Dims, Element, GradientsMut, Inputs, OutputGradient, OutputMut, OutputRef, Overlap,
    Pass,
};

use crate::hook::{self, Hook};
use crate::layout::{Layout, free, give, handle, text};
use crate::options::{self, Options};
use crate::sized::{self, Sized};
use crate::status::{Result, Status, call, invalid};
use crate::tensor::{self, Named, Tensor, list, with_element};

/// A pair that branches share counts once per branch, as in the paper.
pub const LONGSPAN_OVERLAP_WEIGHTED: i32 = 0;
/// A pair that branches share counts once.
pub const LONGSPAN_OVERLAP_UNION: i32 = 1;

/// The pass of `longspan_bytes_needed` that computes the output.
pub const LONGSPAN_PASS_FORWARD: i32 = 0;
/// The pass of `longspan_bytes_needed` that computes gradients.
pub const LONGSPAN_PASS_BACKWARD: i32 = 1;

/// Attention with its options. Workspaces are kept from call to call.
pub struct Attention {
    kind: Kind,
}

enum Kind {
    Layouts(longspan::Attention),
    Dilated(Dilated),
}

/// Branches of dilated attention (LongNet, arXiv 2307.02486). Begin with `LONGSPAN_BRANCHES_INIT`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Branches {
    /// `sizeof(longspan_branches)`.
    pub size: usize,
    /// Branches.
    pub count: usize,
    /// Tokens per segment of each branch.
    pub segment_lengths: *const u64,
    /// The rate of each branch.
    pub dilation_rates: *const u64,
    /// A pattern that cuts every branch, as `"causal"`; null for none.
    pub within: *const c_char,
    /// A pattern that is one more branch; null for none.
    pub also: *const c_char,
    /// One of `LONGSPAN_OVERLAP_…`.
    pub overlap: i32,
    /// Elements of `cu_seqlens_q` and of `cu_seqlens_k`; 0 where sequences are not packed.
    pub cu_seqlens: usize,
    /// Where packed sequences of queries begin, and where the last one ends.
    pub cu_seqlens_q: *const u64,
    /// The same of keys.
    pub cu_seqlens_k: *const u64,
    /// The position of the first query; where null the queries are the last positions.
    pub query_offset: *const i64,
}

// SAFETY: `repr(C)`, the size first, and numbers and pointers, for which zeros are valid.
unsafe impl Sized for Branches {
    const NAME: &'static str = "longspan_branches";
    const FIRST: usize = 88;
}

/// Where gradients are written. Begin with `LONGSPAN_GRADIENTS_INIT`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Gradients {
    /// `sizeof(longspan_gradients)`.
    pub size: usize,
    /// With respect to the queries, of their shape.
    pub dq: *const Tensor,
    /// With respect to the keys.
    pub dk: *const Tensor,
    /// With respect to the values.
    pub dv: *const Tensor,
    /// With respect to sink logits; null where it isn't wanted.
    pub dsink_logits: *mut f32,
    /// Elements of `dsink_logits`, as many as the option has.
    pub sink_heads: usize,
    /// With respect to the bias table; null where it isn't wanted.
    pub dbias_table: *mut f32,
    /// Elements of `dbias_table`, as many as the option has.
    pub bias_elements: usize,
    /// With respect to ALiBi's slopes; null where it isn't wanted.
    pub dalibi_slopes: *mut f32,
    /// Elements of `dalibi_slopes`, as many as the option has.
    pub alibi_heads: usize,
}

// SAFETY: `repr(C)`, the size first, and numbers and pointers, for which zeros are valid.
unsafe impl Sized for Gradients {
    const NAME: &'static str = "longspan_gradients";
    const FIRST: usize = 80;
}

/// Attention over a layout. `options` may be null. Release it with `longspan_attention_free`.
///
/// # Safety
///
/// `layout` is a handle, `options` and what they point to may be read, `attention` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_attention_create(
    layout: *const Layout,
    options: *const Options,
    attention: *mut *mut Attention,
) -> Status {
    call(|| {
        let make = || {
            // SAFETY: as this function demands.
            let (layout, options) = unsafe { (handle("layout", layout)?, options::read(options)?) };
            let made = longspan::Attention::new(layout.layouts.clone()).options(options);
            Ok(Attention { kind: Kind::Layouts(made) })
        };
        // SAFETY: as this function demands.
        unsafe { give("attention", attention, make) }
    })
}

/// Dilated attention. `options` may be null. Release it with `longspan_attention_free`.
///
/// # Safety
///
/// `branches`, `options` and what they point to may be read, `attention` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_dilated_create(
    branches: *const Branches,
    options: *const Options,
    attention: *mut *mut Attention,
) -> Status {
    call(|| {
        let make = || {
            // SAFETY: as this function demands.
            let (branches, options) =
                unsafe { (sized::required(branches)?, options::read(options)?) };
            // SAFETY: as this function demands.
            let dilated = unsafe { dilated(&branches) }?.options(options);
            Ok(Attention { kind: Kind::Dilated(dilated) })
        };
        // SAFETY: as this function demands.
        unsafe { give("attention", attention, make) }
    })
}

/// # Safety
///
/// What the branches point to may be read.
unsafe fn dilated(branches: &Branches) -> Result<Dilated> {
    let Branches { count, cu_seqlens, .. } = *branches;
    // SAFETY: as this function demands.
    let (lengths, rates, queries, keys, within, also, offset) = unsafe {
        (
            list("segment_lengths", branches.segment_lengths, count)?.unwrap_or_default(),
            list("dilation_rates", branches.dilation_rates, count)?.unwrap_or_default(),
            list("cu_seqlens_q", branches.cu_seqlens_q, cu_seqlens)?.unwrap_or_default(),
            list("cu_seqlens_k", branches.cu_seqlens_k, cu_seqlens)?.unwrap_or_default(),
            text("within", branches.within)?,
            text("also", branches.also)?,
            branches.query_offset.as_ref(),
        )
    };
    let mut made = Dilated::new(lengths.iter().copied().zip(rates.iter().copied()))?;
    let pattern = |name: &str, text: &str| -> Result<longspan::Pattern> {
        text.parse().map_err(|error: longspan_pattern::Error| {
            crate::status::Failure::new(Status::InvalidPattern, format!("{name}: {error}"))
        })
    };
    if let Some(text) = within {
        made = made.within(pattern("within", text)?);
    }
    if let Some(text) = also {
        made = made.also(pattern("also", text)?);
    }
    made = made.overlap(match branches.overlap {
        LONGSPAN_OVERLAP_WEIGHTED => Overlap::Weighted,
        LONGSPAN_OVERLAP_UNION => Overlap::Union,
        other => return Err(invalid(format!("overlap is {other}, expected 0 or 1"))),
    });
    if let Some(offset) = offset {
        if cu_seqlens > 0 {
            return Err(invalid("query_offset beside cu_seqlens, expected one of both"));
        }
        made = made.query_offset(*offset);
    }
    if cu_seqlens > 0 {
        made = made.packed_cu_seqlens(queries, keys)?;
    }
    Ok(made)
}

/// Other options for the same attention, which keeps its layouts and workspaces: for parameters that change
/// from call to call. No call may use it meanwhile.
///
/// # Safety
///
/// `attention` is a handle that nothing else uses meanwhile; `options` and what they point to may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_attention_set_options(
    attention: *mut Attention,
    options: *const Options,
) -> Status {
    call(|| {
        // SAFETY: as this function demands.
        let options = unsafe { options::read(options) }?;
        // SAFETY: as this function demands.
        let attention = unsafe { attention.as_mut() };
        let attention = attention.ok_or_else(|| invalid("attention is null, expected a handle"))?;
        match &mut attention.kind {
            Kind::Layouts(kind) => *kind = kind.clone().options(options),
            Kind::Dilated(kind) => *kind = kind.clone().options(options),
        }
        Ok(())
    })
}

/// Releases attention. Null is nothing.
///
/// # Safety
///
/// `attention` is null, or a handle that was not freed, which nothing uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_attention_free(attention: *mut Attention) {
    // SAFETY: as this function demands.
    unsafe { free(attention) };
}

/// The tensors that every call reads.
struct Read {
    q: Named,
    k: Named,
    v: Named,
    output: Dims,
}

impl Read {
    /// # Safety
    ///
    /// Pointers are null, or tensors may be read there.
    unsafe fn new(q: *const Tensor, k: *const Tensor, v: *const Tensor) -> Result<Self> {
        // SAFETY: as this function demands.
        let (q, k, v) =
            unsafe { (Named::read("q", q)?, Named::read("k", k)?, Named::read("v", v)?) };
        k.same_dtype(&q)?;
        v.same_dtype(&q)?;
        let output = Dims { dim: v.dims.dim, ..q.dims };
        Ok(Read { q, k, v, output })
    }

    /// # Safety
    ///
    /// The elements may be read for `'a`.
    unsafe fn inputs<'a, E: Element>(&self) -> Result<Inputs<'a, E>> {
        // SAFETY: as this function demands.
        unsafe { Ok(Inputs::new(self.q.view()?, self.k.view()?, self.v.view()?)) }
    }
}

/// Writes `out`, `(batch, query head, query, value dim)`, and, where they are not null, the log-sum-exp of
/// each row, `[batch, query head, query]`, and what rounding it to f32 has left out, which only
/// `longspan_backward` uses. `hook` may be null.
///
/// # Safety
///
/// `attention` is a handle; elements of tensors may be read, those of `out` and the rows may be written, for
/// the time of the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_forward(
    attention: *const Attention,
    q: *const Tensor,
    k: *const Tensor,
    v: *const Tensor,
    out: *const Tensor,
    lse: *mut f32,
    lse_lo: *mut f32,
    hook: *const Hook,
) -> Status {
    call(|| {
        // SAFETY: as this function demands.
        let (attention, read, out, mut ask) = unsafe {
            (
                handle("attention", attention)?,
                Read::new(q, k, v)?,
                Named::read("out", out)?,
                Hook::read(hook)?,
            )
        };
        out.same_dtype(&read.q)?;
        // SAFETY: as this function demands.
        let (lse, lse_lo) = unsafe {
            (
                tensor::rows_mut("lse", lse, read.output)?,
                tensor::rows_mut("lse_lo", lse_lo, read.output)?,
            )
        };
        let mut own = Vec::new();
        let mut between = hook::between(&mut ask);
        let hook = longspan::Hook::new(&mut between);
        with_element!(read.q.dtype(), E => {
            // SAFETY: as this function demands.
            let (inputs, out) = unsafe { (read.inputs::<E>()?, out.view_mut()?) };
            let lse = tensor::or_own(lse, &mut own, read.output)?;
            let output = OutputMut { out, lse, lse_lo };
            match &attention.kind {
                Kind::Layouts(kind) => kind.forward_into(inputs, output, hook)?,
                Kind::Dilated(kind) => kind.forward_into(inputs, output, hook)?,
            }
        });
        Ok(())
    })
}

/// Writes gradients, from what `longspan_forward` has written and the gradients of the output (`dout`) and of
/// the log-sum-exp (`dlse`, may be null). `lse_lo` may be null, which costs exactness of long rows. `hook`
/// may be null.
///
/// # Safety
///
/// As for `longspan_forward`; what `gradients` point to may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_backward(
    attention: *const Attention,
    q: *const Tensor,
    k: *const Tensor,
    v: *const Tensor,
    out: *const Tensor,
    lse: *const f32,
    lse_lo: *const f32,
    dout: *const Tensor,
    dlse: *const f32,
    gradients: *const Gradients,
    hook: *const Hook,
) -> Status {
    call(|| {
        // SAFETY: as this function demands.
        let (attention, read, out, dout, gradients, mut ask) = unsafe {
            (
                handle("attention", attention)?,
                Read::new(q, k, v)?,
                Named::read("out", out)?,
                Named::read("dout", dout)?,
                sized::required(gradients)?,
                Hook::read(hook)?,
            )
        };
        // SAFETY: as this function demands.
        let (dq, dk, dv, lse, lse_lo, dlse, learned) = unsafe {
            (
                Named::read("gradients.dq", gradients.dq)?,
                Named::read("gradients.dk", gradients.dk)?,
                Named::read("gradients.dv", gradients.dv)?,
                tensor::rows("lse", lse, read.output)?,
                tensor::rows("lse_lo", lse_lo, read.output)?,
                tensor::rows("dlse", dlse, read.output)?,
                [
                    learned("dsink_logits", gradients.dsink_logits, gradients.sink_heads)?,
                    learned("dbias_table", gradients.dbias_table, gradients.bias_elements)?,
                    learned("dalibi_slopes", gradients.dalibi_slopes, gradients.alibi_heads)?,
                ],
            )
        };
        let lse =
            lse.ok_or_else(|| invalid("lse is null, expected what longspan_forward has written"))?;
        for tensor in [&out, &dout, &dq, &dk, &dv] {
            tensor.same_dtype(&read.q)?;
        }
        let mut between = hook::between(&mut ask);
        let hook = longspan::Hook::new(&mut between);
        let [dsink_logits, dbias_table, dalibi_slopes] = learned;
        with_element!(read.q.dtype(), E => {
            // SAFETY: as this function demands.
            let (inputs, output, gradient, gradients) = unsafe {
                (
                    read.inputs::<E>()?,
                    OutputRef { out: out.view()?, lse, lse_lo },
                    OutputGradient { dout: dout.view()?, dlse },
                    GradientsMut {
                        dq: dq.view_mut()?,
                        dk: dk.view_mut()?,
                        dv: dv.view_mut()?,
                        dsink_logits,
                        dbias_table,
                        dalibi_slopes,
                    },
                )
            };
            match &attention.kind {
                Kind::Layouts(kind) => kind.backward_into(inputs, output, gradient, gradients, hook)?,
                Kind::Dilated(kind) => kind.backward_into(inputs, output, gradient, gradients, hook)?,
            }
        });
        Ok(())
    })
}

/// Where the gradient of an option is written.
///
/// # Safety
///
/// The pointer is null, or so many elements may be written there for `'a`.
unsafe fn learned<'a>(name: &str, pointer: *mut f32, len: usize) -> Result<Option<&'a mut [f32]>> {
    if pointer.is_null() {
        return Ok(None);
    }
    let dims = Dims { batch: 1, tokens: len, heads: 1, dim: 1 };
    // SAFETY: as this function demands.
    unsafe { tensor::rows_mut(name, pointer, dims) }
}

/// Writes to `bytes` how many the first call of a pass (`LONGSPAN_PASS_…`) over tensors of these shapes
/// allocates. Of the tensors only shapes and dtypes are read.
///
/// # Safety
///
/// `attention` is a handle, the tensors may be read (not their elements), `bytes` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_bytes_needed(
    attention: *const Attention,
    q: *const Tensor,
    k: *const Tensor,
    v: *const Tensor,
    pass: i32,
    bytes: *mut u64,
) -> Status {
    call(|| {
        // SAFETY: as this function demands.
        let (attention, read) = unsafe { (handle("attention", attention)?, Read::new(q, k, v)?) };
        // SAFETY: as this function demands.
        let bytes =
            unsafe { bytes.as_mut() }.ok_or_else(|| invalid("bytes is null, expected a place"))?;
        let pass = match pass {
            LONGSPAN_PASS_FORWARD => Pass::Forward,
            LONGSPAN_PASS_BACKWARD => Pass::Backward,
            other => return Err(invalid(format!("pass is {other}, expected 0 or 1"))),
        };
        let dims = [read.q.dims, read.k.dims, read.v.dims];
        let needed = with_element!(read.q.dtype(), E => match &attention.kind {
            Kind::Layouts(kind) => kind.bytes_needed::<E>(dims, pass)?,
            Kind::Dilated(kind) => kind.bytes_needed::<E>(dims, pass)?,
        });
        *bytes = needed as u64;
        Ok(())
    })
}

/// Joins two results over disjoint keys: `out` and `lse` become those over the union. `lse_lo` may be null.
///
/// # Safety
///
/// Elements of `out` and its rows may be read and written, those of the other result may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn longspan_merge(
    out: *const Tensor,
    lse: *mut f32,
    lse_lo: *mut f32,
    other_out: *const Tensor,
    other_lse: *const f32,
) -> Status {
    call(|| {
        // SAFETY: as this function demands.
        let (out, other) =
            unsafe { (Named::read("out", out)?, Named::read("other_out", other_out)?) };
        other.same_dtype(&out)?;
        // SAFETY: as this function demands.
        let (lse, lse_lo, other_lse) = unsafe {
            (
                tensor::rows_mut("lse", lse, out.dims)?,
                tensor::rows_mut("lse_lo", lse_lo, out.dims)?,
                tensor::rows("other_lse", other_lse, other.dims)?,
            )
        };
        let lse = lse.ok_or_else(|| invalid("lse is null, expected that of out"))?;
        let other_lse =
            other_lse.ok_or_else(|| invalid("other_lse is null, expected that of other_out"))?;
        with_element!(out.dtype(), E => {
            // SAFETY: as this function demands.
            let (out, other) = unsafe { (out.view_mut::<E>()?, other.view::<E>()?) };
            longspan::merge_outputs(OutputMut { out, lse, lse_lo }, other, other_lse)?;
        });
        Ok(())
    })
}
