//! What `benches/peers` calls Longspan through: the few functions that its script needs, with C's
//! calling convention.
//!
//! Every function that can fail returns null, or a text that says what was wrong and belongs to
//! the caller, who gives it back to [`peers_free_text`]; results are written where the caller
//! says. Panics become such texts too. Tensors are contiguous, `[batch, head, token, dim]`; they
//! hold f32 or bf16, as the plan says.
//!
//! Not a binding for users: it trusts its caller with every pointer.

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_void};
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use half::bf16;
use longspan::{
    Attention, Dims, Element, ElementType, GradientsMut, Hook, Inputs, Isa, Layout, Order,
    OutputMut, OutputRef, Pattern, Shape, View, ViewMut, limits,
};

/// A compiled pattern and how it runs.
pub struct Plan {
    attention: Attention,
    element: ElementType,
    /// Pairs of query and key that one head computes.
    pairs: u64,
}

/// What a [`Plan`] is made from.
#[repr(C)]
pub struct Request {
    /// The pattern's text.
    pub pattern: *const c_char,
    /// The instruction set's name, or null for the fastest.
    pub isa: *const c_char,
    /// The name of what tensors hold.
    pub dtype: *const c_char,
    /// Queries; they are the last of the keys' positions.
    pub queries: u64,
    /// Keys.
    pub keys: u64,
    /// How many threads work on a call.
    pub threads: usize,
}

/// How many elements the axes of all tensors have.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Extents {
    /// Sequences.
    pub batch: usize,
    /// Tokens of q, out, dout and dq.
    pub queries: usize,
    /// Tokens of k, v, dk and dv.
    pub keys: usize,
    /// Heads of q, out, dout and dq.
    pub heads: usize,
    /// Heads of k, v, dk and dv.
    pub kv_heads: usize,
    /// Elements per head.
    pub dim: usize,
}

impl Extents {
    fn query_side(&self) -> Dims {
        Dims { batch: self.batch, tokens: self.queries, heads: self.heads, dim: self.dim }
    }

    fn key_side(&self) -> Dims {
        Dims { batch: self.batch, tokens: self.keys, heads: self.kv_heads, dim: self.dim }
    }

    fn rows(&self) -> usize {
        self.batch * self.heads * self.queries
    }
}

/// What both passes read.
#[repr(C)]
pub struct InputTensors {
    /// Queries.
    pub q: *const c_void,
    /// Keys.
    pub k: *const c_void,
    /// Values.
    pub v: *const c_void,
}

/// What the forward pass writes.
#[repr(C)]
pub struct OutputTensors {
    /// Output.
    pub out: *mut c_void,
    /// Log-sum-exp, `[batch, head, token]`.
    pub lse: *mut f32,
    /// What its rounding left out.
    pub lse_lo: *mut f32,
}

/// What the backward pass reads besides its inputs.
#[repr(C)]
pub struct SavedTensors {
    /// Output of the forward pass.
    pub out: *const c_void,
    /// Its log-sum-exp.
    pub lse: *const f32,
    /// What its rounding left out.
    pub lse_lo: *const f32,
    /// Gradient with respect to the output.
    pub dout: *const c_void,
}

/// What the backward pass writes.
#[repr(C)]
pub struct GradientTensors {
    /// With respect to the queries.
    pub dq: *mut c_void,
    /// With respect to the keys.
    pub dk: *mut c_void,
    /// With respect to the values.
    pub dv: *mut c_void,
}

/// Compiles a pattern. The plan belongs to the caller, who gives it back to [`peers_free_plan`].
///
/// # Safety
///
/// The texts of `request` end in a zero byte, `plan` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_plan(request: &Request, plan: *mut *mut Plan) -> *mut c_char {
    guard(|| {
        // SAFETY: this function demands a text that ends in a zero byte.
        let pattern: Pattern = unsafe { text(request.pattern) }?.parse().map_err(display)?;
        // SAFETY: this function demands a text that ends in a zero byte.
        let isa = unsafe { isa(request.isa) }?;
        // SAFETY: this function demands a text that ends in a zero byte.
        let element = unsafe { text(request.dtype) }?.parse().map_err(display)?;
        if !matches!(element, ElementType::F32 | ElementType::Bf16) {
            return Err(format!("tensors of {element}, expected f32 or bf16"));
        }
        let threads = at_least_one(request.threads)?;
        let shape = Shape::new(request.queries as usize, request.keys as usize);
        let layout = Layout::compile(&pattern, &shape).map_err(display)?;
        let pairs =
            u64::try_from(layout.counts().map_err(display)?.active_pairs).map_err(display)?;
        let attention = Attention::new(layout).threads(threads.get()).isa(isa);
        // SAFETY: this function demands a pointer of this kind.
        unsafe { plan.write(Box::into_raw(Box::new(Plan { attention, element, pairs }))) };
        Ok(())
    })
}

/// Ends a plan.
///
/// # Safety
///
/// `plan` comes from [`peers_plan`] and isn't used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_free_plan(plan: *mut Plan) {
    // SAFETY: `peers_plan` made the box, and this function demands that it isn't used any more.
    drop(unsafe { Box::from_raw(plan) });
}

/// Pairs of query and key that one head of one batch entry computes.
#[unsafe(no_mangle)]
pub extern "C" fn peers_pairs(plan: &Plan) -> u64 {
    plan.pairs
}

/// Output and log-sum-exp.
///
/// # Safety
///
/// All tensors have the extents given, and nothing else touches those that are written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_forward(
    plan: &Plan,
    extents: &Extents,
    inputs: &InputTensors,
    output: &OutputTensors,
) -> *mut c_char {
    // SAFETY: both functions have the same condition, for the element type of the plan.
    guard(|| unsafe {
        match plan.element {
            ElementType::Bf16 => forward::<bf16>(plan, extents, inputs, output),
            _ => forward::<f32>(plan, extents, inputs, output),
        }
    })
}

/// # Safety
///
/// As [`peers_forward`]; tensors hold `E`.
unsafe fn forward<E: Element>(
    plan: &Plan,
    extents: &Extents,
    inputs: &InputTensors,
    output: &OutputTensors,
) -> Result<(), String> {
    // SAFETY: this function demands tensors of these extents.
    let inputs = unsafe { inputs_of::<E>(extents, inputs) }?;
    let output = OutputMut {
        // SAFETY: as above.
        out: unsafe { written(output.out, extents.query_side()) }?,
        // SAFETY: as above.
        lse: unsafe { std::slice::from_raw_parts_mut(output.lse, extents.rows()) },
        // SAFETY: as above.
        lse_lo: Some(unsafe { std::slice::from_raw_parts_mut(output.lse_lo, extents.rows()) }),
    };
    plan.attention.forward_into(inputs, output, Hook::none()).map_err(display)
}

/// Gradients with respect to queries, keys and values.
///
/// # Safety
///
/// As [`peers_forward`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_backward(
    plan: &Plan,
    extents: &Extents,
    inputs: &InputTensors,
    saved: &SavedTensors,
    gradients: &GradientTensors,
) -> *mut c_char {
    // SAFETY: both functions have the same condition, for the element type of the plan.
    guard(|| unsafe {
        match plan.element {
            ElementType::Bf16 => backward::<bf16>(plan, extents, inputs, saved, gradients),
            _ => backward::<f32>(plan, extents, inputs, saved, gradients),
        }
    })
}

/// # Safety
///
/// As [`peers_backward`]; tensors hold `E`.
unsafe fn backward<E: Element>(
    plan: &Plan,
    extents: &Extents,
    inputs: &InputTensors,
    saved: &SavedTensors,
    gradients: &GradientTensors,
) -> Result<(), String> {
    // SAFETY: this function demands tensors of these extents.
    let inputs = unsafe { inputs_of::<E>(extents, inputs) }?;
    let output = OutputRef {
        // SAFETY: as above.
        out: unsafe { read(saved.out, extents.query_side()) }?,
        // SAFETY: as above.
        lse: unsafe { std::slice::from_raw_parts(saved.lse, extents.rows()) },
        // SAFETY: as above.
        lse_lo: Some(unsafe { std::slice::from_raw_parts(saved.lse_lo, extents.rows()) }),
    };
    // SAFETY: as above.
    let dout = unsafe { read(saved.dout, extents.query_side()) }?;
    let gradients = GradientsMut::new(
        // SAFETY: as above.
        unsafe { written(gradients.dq, extents.query_side()) }?,
        // SAFETY: as above.
        unsafe { written(gradients.dk, extents.key_side()) }?,
        // SAFETY: as above.
        unsafe { written(gradients.dv, extents.key_side()) }?,
    );
    plan.attention.backward_into(inputs, output, dout, gradients, Hook::none()).map_err(display)
}

/// The name of the fastest instruction set of this CPU, a text that belongs to the caller.
#[unsafe(no_mangle)]
pub extern "C" fn peers_best_isa() -> *mut c_char {
    owned(Isa::best().to_string())
}

/// The rate of fused multiply-adds on registers alone, in GFLOP/s of all threads together.
///
/// # Safety
///
/// `isa_name` is null or ends in a zero byte, `rate` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_fma_peak(
    isa_name: *const c_char,
    threads: usize,
    rate: *mut f64,
) -> *mut c_char {
    guard(|| {
        // SAFETY: this function demands a text that ends in a zero byte.
        let isa = unsafe { isa(isa_name) }?;
        let found = limits::fma_peak(isa, at_least_one(threads)?).map_err(display)?;
        // SAFETY: this function demands a pointer of this kind.
        unsafe { rate.write(found) };
        Ok(())
    })
}

/// The rate of the matrix unit for bf16 on registers alone, likewise; 0 where there is none.
///
/// # Safety
///
/// `rate` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_amx_peak(threads: usize, rate: *mut f64) -> *mut c_char {
    guard(|| {
        let found = limits::amx_peak(at_least_one(threads)?).unwrap_or(0.0);
        // SAFETY: this function demands a pointer of this kind.
        unsafe { rate.write(found) };
        Ok(())
    })
}

/// The rate at which `len` numbers at `data` are read, in GB/s of all threads together.
///
/// # Safety
///
/// They may be read, and `rate` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_read_bandwidth(
    data: *const f32,
    len: usize,
    threads: usize,
    rate: *mut f64,
) -> *mut c_char {
    guard(|| {
        // SAFETY: this function demands that so many elements lie there.
        let data = unsafe { std::slice::from_raw_parts(data, len) };
        let found = limits::read_bandwidth(data, at_least_one(threads)?);
        // SAFETY: this function demands a pointer of this kind.
        unsafe { rate.write(found) };
        Ok(())
    })
}

/// Ends a text.
///
/// # Safety
///
/// `text` comes from a function of this library and isn't used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peers_free_text(text: *mut c_char) {
    // SAFETY: this function demands a text that `owned` made, which isn't used any more.
    drop(unsafe { CString::from_raw(text) });
}

/// Null, or what was wrong.
fn guard(work: impl FnOnce() -> Result<(), String>) -> *mut c_char {
    let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(said(&*panic)));
    result.err().map_or(ptr::null_mut(), owned)
}

fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panicked: {}", text.unwrap_or("without a text"))
}

fn owned(text: String) -> *mut c_char {
    CString::new(text.replace('\0', "")).unwrap_or_default().into_raw()
}

fn at_least_one(threads: usize) -> Result<NonZeroUsize, String> {
    NonZeroUsize::new(threads).ok_or_else(|| "0 threads, expected at least 1".to_owned())
}

fn display(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// # Safety
///
/// `pointer` ends in a zero byte, within a time that the caller chooses.
unsafe fn text<'a>(pointer: *const c_char) -> Result<&'a str, String> {
    // SAFETY: this function demands a pointer of this kind.
    unsafe { CStr::from_ptr(pointer) }.to_str().map_err(display)
}

/// # Safety
///
/// `name` is null or as in [`text`].
unsafe fn isa(name: *const c_char) -> Result<Isa, String> {
    if name.is_null() {
        return Ok(Isa::best());
    }
    // SAFETY: this function demands a pointer of this kind.
    unsafe { text(name) }?.parse().map_err(display)
}

/// # Safety
///
/// All tensors have the extents given for a time that the caller chooses.
unsafe fn inputs_of<'a, E: Element>(
    extents: &Extents,
    inputs: &InputTensors,
) -> Result<Inputs<'a, E>, String> {
    // SAFETY: this function demands all three, of these extents.
    unsafe {
        Ok(Inputs {
            q: read(inputs.q, extents.query_side())?,
            k: read(inputs.k, extents.key_side())?,
            v: read(inputs.v, extents.key_side())?,
        })
    }
}

/// # Safety
///
/// A tensor of `dims` lies at `first`, for a time that the caller chooses.
unsafe fn read<'a, E: Element>(first: *const c_void, dims: Dims) -> Result<View<'a, E>, String> {
    let elements = dims.elements().ok_or("a tensor's elements can't be counted")?;
    // SAFETY: this function demands that so many elements lie there.
    let data = unsafe { std::slice::from_raw_parts(first.cast(), elements) };
    View::new(data, dims, Order::Bhsd).map_err(display)
}

/// # Safety
///
/// As [`read`], and nothing else touches it.
unsafe fn written<'a, E: Element>(
    first: *mut c_void,
    dims: Dims,
) -> Result<ViewMut<'a, E>, String> {
    let elements = dims.elements().ok_or("a tensor's elements can't be counted")?;
    // SAFETY: this function demands that so many elements lie there.
    let data = unsafe { std::slice::from_raw_parts_mut(first.cast(), elements) };
    ViewMut::new(data, dims, Order::Bhsd).map_err(display)
}
