//! From a validated call to tasks on workers.
//!
//! [`forward()`] and [`backward()`] validate a call, partition it into tasks and run those on the
//! workers of its options. [`dispatch`] is the one place where instruction set and element type
//! become types.

mod backward;
pub(crate) mod bytes;
mod forward;
pub(crate) mod gradients;
pub(crate) mod masses;
pub(crate) mod summaries;

pub(crate) use self::backward::{backward, backward_bytes};
pub(crate) use self::forward::{Target, forward, forward_bytes};

use std::marker::PhantomData;

use crate::arguments::Inputs;
use crate::check;
use crate::dims::Sizes;
use crate::dtype::Element;
#[cfg(target_arch = "x86_64")]
use crate::dtype::ElementType;
use crate::error::Result;
use crate::exec::{Monitor, Workers};
use crate::gemm::Fma;
use crate::isa::Isa;
use crate::kernel::fused::FusedKernel;
use crate::layouts::Layouts;
use crate::options::Options;
use crate::score::Additions;
use crate::simd::{self, Simd, WithSimd};
use crate::tasks::{Plan, Stream};
use crate::tensor::Raw;

/// Blocks × dims below which waking another thread costs more than it saves.
const SMALL: u64 = 64;

/// What both passes need of a call.
pub(crate) struct Call<'a, 'h, E> {
    pub(crate) options: &'a Options,
    pub(crate) layouts: &'a Layouts,
    pub(crate) sizes: Sizes,
    pub(crate) scale: f32,
    pub(crate) additions: Option<Additions<'a>>,
    pub(crate) workers: Workers<'a>,
    pub(crate) q: Raw<E>,
    pub(crate) k: Raw<E>,
    pub(crate) v: Raw<E>,
    pub(crate) monitor: &'a Monitor<'h>,
}

impl<'a, 'h, E: Element> Call<'a, 'h, E> {
    fn new(
        options: &'a Options,
        layouts: &'a Layouts,
        inputs: &Inputs<'_, E>,
        monitor: &'a Monitor<'h>,
    ) -> Result<Self> {
        let sizes = check::inputs(options, layouts, inputs)?;
        Ok(Call {
            options,
            layouts,
            sizes,
            scale: options.scale.unwrap_or(1.0 / (sizes.dim as f32).sqrt()),
            additions: Additions::of(&options.score, options.dropout, sizes.heads),
            workers: options.workers()?,
            q: Raw::read(&inputs.q),
            k: Raw::read(&inputs.k),
            v: Raw::read(&inputs.v),
            monitor,
        })
    }

    pub(crate) fn stream<'s>(&'s self, plan: &'s Plan, number: u32) -> Stream<'s> {
        plan.stream(self.layouts, &self.sizes, number)
    }

    /// The threads that tasks of so many blocks are worth.
    pub(crate) fn workers_for(&self, blocks: u64, tasks: usize) -> Workers<'a> {
        let work = blocks * (self.sizes.dim + self.sizes.value_dim) as u64 / 128;
        self.workers.at_most(if work < SMALL { 1 } else { tasks })
    }
}

/// A pass, to be compiled for an instruction set.
pub(crate) trait FusedPass<E> {
    fn with<X: FusedKernel<Element = E>>(self, tiles: X) -> Result<()>;
}

/// Runs a pass over elements that are known by their type alone: `$pass` is a path to a generic
/// type of passes. Each instance is compiled here, once, not in every crate that calls it.
macro_rules! dispatch_on_dtype {
    ($pass:ident, $value:expr) => {{
        fn of_f32(pass: $pass<'_, '_, f32>) -> Result<()> {
            let options = pass.call.options;
            #[cfg(target_arch = "x86_64")]
            if on_matrix_unit(options, ElementType::F32)? {
                return pass.with($crate::gemm::amx::SplitAmx::new());
            }
            dispatch(options, pass)
        }
        fn of_f16(pass: $pass<'_, '_, half::f16>) -> Result<()> {
            let options = pass.call.options;
            dispatch(options, pass)
        }
        fn of_bf16(pass: $pass<'_, '_, half::bf16>) -> Result<()> {
            let options = pass.call.options;
            #[cfg(target_arch = "x86_64")]
            if on_matrix_unit(options, ElementType::Bf16)? {
                return pass.with($crate::gemm::amx::Amx::new());
            }
            dispatch(options, pass)
        }
        let pass = std::mem::ManuallyDrop::new($value);
        let pass = std::ptr::from_ref(&*pass);
        // SAFETY: `Element::TYPE` names the type `E`, so the cast is one to the same type. The
        // value is read once, and not dropped where it was.
        unsafe {
            match E::TYPE {
                ElementType::F32 => of_f32(pass.cast::<$pass<'_, '_, f32>>().read()),
                ElementType::F16 => of_f16(pass.cast::<$pass<'_, '_, half::f16>>().read()),
                ElementType::Bf16 => of_bf16(pass.cast::<$pass<'_, '_, half::bf16>>().read()),
            }
        }
    }};
}

use dispatch_on_dtype;

/// Whether products of such elements are those of the matrix unit.
#[cfg(target_arch = "x86_64")]
fn on_matrix_unit(options: &Options, dtype: ElementType) -> Result<bool> {
    let isa = Isa::choose(options.isa)?;
    Ok(options.precision.compute_types(dtype, isa).multiplied != ElementType::F32)
}

/// Chooses the instruction set.
fn dispatch<E: Element>(options: &Options, pass: impl FusedPass<E>) -> Result<()> {
    struct Chosen<P, E>(P, PhantomData<E>);
    impl<P: FusedPass<E>, E: Element> WithSimd for Chosen<P, E> {
        type Output = Result<()>;

        fn with<S: Simd>(self, simd: S) -> Result<()> {
            self.0.with(Fma::new(simd))
        }
    }
    simd::dispatch(Isa::choose(options.isa)?, Chosen(pass, PhantomData))
}
