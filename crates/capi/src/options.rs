//! Options of calls.

use std::sync::Arc;

use longspan::{BiasTable, Dropout, Isa, Precision, Score};

use crate::hook::Executor;
use crate::sized::{self, Sized};
use crate::status::{Failure, Result, Status, call, invalid};
use crate::tensor::list;

/// The fastest instruction set that this CPU has.
pub const LONGSPAN_ISA_BEST: i32 = 0;
/// Plain code, for any CPU.
pub const LONGSPAN_ISA_PORTABLE: i32 = 1;
/// Arm's 128-bit vectors.
pub const LONGSPAN_ISA_NEON: i32 = 2;
/// 256-bit vectors.
pub const LONGSPAN_ISA_AVX2: i32 = 3;
/// 512-bit vectors.
pub const LONGSPAN_ISA_AVX512: i32 = 4;
/// 512-bit vectors and a matrix unit.
pub const LONGSPAN_ISA_AMX: i32 = 5;

/// Products at the precision of the tensors.
pub const LONGSPAN_PRECISION_HIGHEST: i32 = 0;
/// f32 products as three of bf16 where the CPU has a matrix unit.
pub const LONGSPAN_PRECISION_HIGH: i32 = 1;
/// f32 products of bf16, too.
pub const LONGSPAN_PRECISION_WIDENED: i32 = 2;

/// What calls are configured with. Begin with `LONGSPAN_OPTIONS_INIT`: what is 0 or null isn't given.
///
/// Lists are copied when a handle is made. They have one element per query head.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Options {
    /// `sizeof(longspan_options)`.
    pub size: usize,
    /// The factor of scores; 1 / sqrt(dim) where null.
    pub scale: *const f32,
    /// Scores become `softcap * tanh(score / softcap)`; null for none.
    pub softcap: *const f32,
    /// Scores lose `slope * |query - key|`; null for none.
    pub alibi_slopes: *const f32,
    /// Elements of `alibi_slopes`.
    pub alibi_heads: usize,
    /// `[bias_heads, bias_columns]`: `bias_table[head][query - key + bias_right]`, distances clamped to those
    /// of the table, joins scores; null for none.
    pub bias_table: *const f32,
    /// Rows of `bias_table`.
    pub bias_heads: usize,
    /// Columns of `bias_table`.
    pub bias_columns: usize,
    /// The column of distance 0.
    pub bias_right: usize,
    /// A logit per head that joins the denominator of each of its rows once, with value 0; null for none.
    pub sink_logits: *const f32,
    /// Elements of `sink_logits`.
    pub sink_heads: usize,
    /// The share of probabilities that are dropped, at least 0 and below 1. Which ones depends on
    /// `dropout_seed` and positions alone.
    pub dropout_p: f64,
    /// The seed of dropout.
    pub dropout_seed: u64,
    /// Threads of a call, the calling one included; 0 for as many as the executor has.
    pub threads: usize,
    /// Threads of the caller; null for those of the library. The struct is copied.
    pub executor: *const Executor,
    /// One of `LONGSPAN_ISA_…`.
    pub isa: i32,
    /// One of `LONGSPAN_PRECISION_…`.
    pub precision: i32,
}

// SAFETY: `repr(C)`, the size first, and numbers and pointers, for which zeros are valid.
unsafe impl Sized for Options {
    const NAME: &'static str = "longspan_options";
    const FIRST: usize = 128;
}

/// The options of a handle.
///
/// # Safety
///
/// The pointer is null, or options may be read there, with lists as long as they say.
pub(crate) unsafe fn read(pointer: *const Options) -> Result<longspan::Options> {
    // SAFETY: as this function demands.
    let Some(options) = unsafe { sized::read(pointer) }? else {
        return Ok(longspan::Options::default());
    };
    // SAFETY: lists are as long as they say.
    let made = unsafe {
        let mut made = longspan::Options::default().score(score(&options)?);
        if let Some(scale) = number("scale", options.scale)? {
            made = made.scale(scale);
        }
        if let Some(logits) = list("sink_logits", options.sink_logits, options.sink_heads)? {
            made = made.sink_logits(logits);
        }
        made
    };
    let mut made = made.precision(match options.precision {
        LONGSPAN_PRECISION_HIGHEST => Precision::Highest,
        LONGSPAN_PRECISION_HIGH => Precision::High,
        LONGSPAN_PRECISION_WIDENED => Precision::Widened,
        other => return Err(invalid(format!("precision is {other}, expected 0, 1 or 2"))),
    });
    let isa = match options.isa {
        LONGSPAN_ISA_BEST => None,
        LONGSPAN_ISA_PORTABLE => Some(Isa::Portable),
        LONGSPAN_ISA_NEON => Some(Isa::Neon),
        LONGSPAN_ISA_AVX2 => Some(Isa::Avx2),
        LONGSPAN_ISA_AVX512 => Some(Isa::Avx512),
        LONGSPAN_ISA_AMX => Some(Isa::Amx),
        other => return Err(invalid(format!("isa is {other}, expected 0 to 5"))),
    };
    if let Some(isa) = isa {
        if !isa.is_available() {
            let has: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
            let (isa, has) = (isa.name(), has.join(", "));
            let message = format!("isa is {isa}, this CPU has {has}");
            return Err(Failure::new(Status::Unsupported, message));
        }
        made = made.isa(isa);
    }
    if options.dropout_p != 0.0 {
        made = made.dropout(Dropout::new(options.dropout_p, options.dropout_seed)?);
    }
    if options.threads != 0 {
        longspan::Threads::from(options.threads).count()?;
        made = made.threads(options.threads);
    }
    if !options.executor.is_null() {
        // SAFETY: options may be read, and so may what they point to.
        let executor = unsafe { *options.executor };
        if executor.run.is_none() || executor.threads == 0 {
            return Err(invalid(format!(
                "executor has {} threads and {}, expected at least 1 and a function",
                executor.threads,
                if executor.run.is_none() { "no run" } else { "a run" }
            )));
        }
        made = made.executor(Arc::new(executor));
    }
    Ok(made)
}

/// # Safety
///
/// Lists are as long as the options say.
unsafe fn score(options: &Options) -> Result<Score> {
    let mut score = Score::default();
    // SAFETY: as this function demands.
    unsafe {
        if let Some(cap) = number("softcap", options.softcap)? {
            score = score.softcap(cap);
        }
        if let Some(slopes) = list("alibi_slopes", options.alibi_slopes, options.alibi_heads)? {
            score = score.alibi_slopes(slopes);
        }
        let Options { bias_heads, bias_columns, bias_right, .. } = *options;
        let elements = bias_heads.checked_mul(bias_columns);
        let elements = elements.ok_or_else(|| invalid("bias_heads × bias_columns overflows"))?;
        if let Some(values) = list("bias_table", options.bias_table, elements)? {
            let left = bias_columns.checked_sub(bias_right).and_then(|left| left.checked_sub(1));
            let left = left.ok_or_else(|| {
                invalid(format!(
                    "bias_right is {bias_right} with {bias_columns} columns, expected it below that"
                ))
            })?;
            score = score.bias_table(BiasTable::new(values, left, bias_right)?);
        } else if bias_right != 0 {
            return Err(invalid(format!(
                "bias_right is {bias_right} without a bias_table, expected 0"
            )));
        }
    }
    Ok(score)
}

/// # Safety
///
/// The pointer is null, or a number may be read there.
unsafe fn number(name: &str, pointer: *const f32) -> Result<Option<f32>> {
    // SAFETY: as this function demands.
    let number = unsafe { list(name, pointer, usize::from(!pointer.is_null())) }?;
    Ok(number.map(|number| number[0]))
}

/// Ends the threads of the library, busy ones after the call that they work on, and waits until they have
/// ended; the next call starts them again. Needed before the library is unloaded, and for tools that look
/// for threads at the end of a program. Not from a hook.
#[unsafe(no_mangle)]
pub extern "C" fn longspan_trim() {
    call(|| {
        longspan::Pool::global().join();
        Ok(())
    });
}
