//! Values as rows of whole f32 vectors, which a product reads a row at a time.

use crate::dtype::{Element, load};
use crate::gemm::Rows;
use crate::simd::{Operation, Simd};
use crate::tensor::Strided;

/// Copies values to rows of whole vectors, 0 behind them, and in place of what isn't finite if that
/// is asked for.
///
/// # Safety
///
/// keys × columns elements must be readable at `source`, and `keys` rows of as many, rounded up to
/// whole vectors, be writable at `target`, none of them shared.
pub(super) struct ValueRows<E> {
    pub(super) source: Strided<E>,
    pub(super) keys: usize,
    pub(super) columns: usize,
    pub(super) clean: bool,
    pub(super) target: Rows,
}

impl<E: Element> Operation for ValueRows<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let ValueRows { source, keys, columns, clean, target } = self;
        let quick = source.column == 1 && !clean;
        let whole = if quick { columns / S::WIDTH * S::WIDTH } else { 0 };
        for key in 0..keys {
            // SAFETY: keys are below `keys`; columns are read below `columns` and written below the
            // next multiple of a vector's width, as the type demands.
            unsafe {
                let (from, to) = (source.at(key, 0), target.at(key, 0).first);
                for column in (0..whole).step_by(S::WIDTH) {
                    simd.store(to.add(column), load(simd, from.first.add(column)));
                }
                for column in whole..columns.next_multiple_of(S::WIDTH) {
                    let x = if column < columns { *from.at(0, column).first } else { E::default() };
                    let x = x.to_f32();
                    *to.add(column) = if clean && !x.is_finite() { 0.0 } else { x };
                }
            }
        }
    }
}
