//! The matrix part: products of small matrices that lie in cache.
//!
//! Attention is five products and some arithmetic between them. Kernels see them through
//! [`Tiles`]: operands are made ready (`left`, `right`), then multiplied. What "ready" means is the
//! implementation's own: the f32 one, [`Direct`], reads operands where they lie; a matrix unit
//! would convert and repack them into the room it is given, probabilities too.
//!
//! ```text
//! target[m × n] ← target · (nothing, 1, or a factor a column) + left[m × k] · right[k × n]
//! ```
//!
//! `right` and `target` are rows of whole vectors, `left` is read number by number, each spread
//! over a vector. So `left` may have any strides: keys, values, queries and gradients are used
//! where the caller has them. The columns of `right` are the tokens of a tile, side by side.
//!
//! A register tile holds as many sums as the registers allow, started at zero and added to the
//! target at the end. Sums are thereby taken in levels, within a [piece](Size::piece), over pieces
//! and over products, which keeps the error of a long row near that of a short one.

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use crate::simd::{Operation, Simd};

/// A matrix of which single numbers are read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strided {
    /// The number at row 0, column 0.
    pub(crate) first: *const f32,
    /// From one row to the next.
    pub(crate) row: isize,
    /// From one column to the next.
    pub(crate) column: isize,
}

impl Strided {
    /// The part of it that starts at a row and a column.
    ///
    /// # Safety
    ///
    /// They must be in the matrix.
    #[inline(always)]
    pub(crate) unsafe fn at(self, row: usize, column: usize) -> Self {
        let offset = row as isize * self.row + column as isize * self.column;
        // SAFETY: the caller says that it is in the matrix.
        Strided { first: unsafe { self.first.offset(offset) }, ..self }
    }

    /// Rows and columns exchanged.
    #[inline(always)]
    pub(crate) fn transposed(self) -> Self {
        Strided { first: self.first, row: self.column, column: self.row }
    }
}

/// A matrix of whole vectors a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    /// The number at row 0, column 0.
    pub(crate) first: *mut f32,
    /// From one row to the next.
    pub(crate) row: usize,
}

impl Rows {
    /// The part of it that starts at a row and a column.
    ///
    /// # Safety
    ///
    /// They must be in the matrix.
    #[inline(always)]
    pub(crate) unsafe fn at(self, row: usize, column: usize) -> Self {
        // SAFETY: the caller says that it is in the matrix.
        Rows { first: unsafe { self.first.add(row * self.row + column) }, ..self }
    }

    /// The same numbers, to be read one by one.
    #[inline(always)]
    pub(crate) fn strided(self) -> Strided {
        Strided { first: self.first, row: self.row as isize, column: 1 }
    }
}

/// What becomes of the numbers that the target holds.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Keep {
    /// They are overwritten.
    Nothing,
    /// They are added to.
    All,
    /// They are multiplied by a factor a column first.
    Scaled(*const f32),
}

/// Which terms of a product are summed.
///
/// A masked probability is exactly 0, and a product with it adds exactly nothing, unless the other
/// factor is infinite or NaN. Leaving its terms out then gives what a finite factor would have
/// given, to the bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Terms {
    /// All of them.
    All,
    /// Not those whose left factor is 0.
    LeftNotZero,
    /// Not those whose right factor is 0.
    RightNotZero,
}

/// The sizes of a product. `n` is a whole number of vectors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// The most terms that are summed before the sum is added to that of the others. Rounding errors
    /// of a sum in two levels grow as `√(piece + k / piece)`, not as `√k`.
    pub(crate) piece: usize,
}

/// Terms a piece of a product of queries and keys, or of gradients and values. The error of a score
/// enters every probability, and counts most where the probability is large.
pub(crate) const OVER_DIMS: usize = 16;

/// Terms a piece of a sum over tokens.
pub(crate) const OVER_TOKENS: usize = 64;

/// Rows that will be read soon: asked for while a product is at work, where memory is what limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead {
    pub(crate) matrix: Strided,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl Ahead {
    /// Nothing.
    pub(crate) const NOTHING: Ahead = Ahead {
        matrix: Strided { first: std::ptr::null(), row: 0, column: 0 },
        rows: 0,
        columns: 0,
    };

    /// The rows that fall to `from..to` of work of size `of`.
    #[inline(always)]
    fn share(self, from: usize, to: usize, of: usize) -> Ahead {
        if self.rows == 0 {
            return self;
        }
        let (first, end) = (self.rows * from / of.max(1), self.rows * to / of.max(1));
        Ahead { rows: end, ..self }.from(first)
    }

    /// What is left without the first rows.
    #[inline(always)]
    fn from(self, rows: usize) -> Ahead {
        let first = self.matrix.first.wrapping_offset(rows as isize * self.matrix.row);
        Ahead { matrix: Strided { first, ..self.matrix }, rows: self.rows - rows, ..self }
    }

    /// Asks for the next rows, and takes them away.
    #[inline(always)]
    fn next<S: Simd>(&mut self, simd: S, rows: usize) {
        let rows = rows.min(self.rows);
        Ahead { rows, ..*self }.fetch(simd);
        *self = self.from(rows);
    }

    #[inline(always)]
    fn fetch<S: Simd>(self, simd: S) {
        /// Numbers of a cache line.
        const LINE: usize = 16;
        for row in 0..self.rows {
            let first = self.matrix.first.wrapping_offset(row as isize * self.matrix.row);
            for column in (0..self.columns).step_by(LINE) {
                simd.prefetch(first.wrapping_offset(column as isize * self.matrix.column));
            }
        }
    }
}

/// `target ← keep(target) + left · right`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Multiply<L, R> {
    pub(crate) target: Rows,
    pub(crate) keep: Keep,
    pub(crate) left: L,
    pub(crate) right: R,
    pub(crate) size: Size,
    pub(crate) terms: Terms,
    pub(crate) ahead: Ahead,
}

/// How operands are made ready, and multiplied.
pub(crate) trait Tiles: Copy + Send + Sync {
    /// The vectors that go with it.
    type Simd: Simd;
    /// An operand on the left, ready.
    type Left: Copy;
    /// An operand on the right, ready.
    type Right: Copy;
    /// What a thread holds while it multiplies.
    type Session;

    /// The token of the vectors.
    fn simd(self) -> Self::Simd;

    /// Sets this thread up; the session's end releases what was set up.
    fn session(self) -> Self::Session;

    /// Numbers of room that [`left`](Self::left) may use.
    fn left_room(m: usize, k: usize) -> usize;

    /// Numbers of room that [`right`](Self::right) may use.
    fn right_room(k: usize, n: usize) -> usize;

    /// Makes `matrix[m × k]` ready.
    ///
    /// # Safety
    ///
    /// The matrix must be readable, and the room writable, for as long as the operand is used.
    unsafe fn left(self, matrix: Strided, m: usize, k: usize, room: *mut f32) -> Self::Left;

    /// Makes `matrix[k × n]` ready.
    ///
    /// # Safety
    ///
    /// The matrix must be readable, and the room writable, for as long as the operand is used.
    unsafe fn right(self, matrix: Rows, k: usize, n: usize, room: *mut f32) -> Self::Right;

    /// Multiplies.
    ///
    /// # Safety
    ///
    /// The operands must be as large as `size` says, the target writable, and nothing of it shared
    /// with the operands.
    unsafe fn multiply(self, work: Multiply<Self::Left, Self::Right>);
}

/// f32 operands, used where they lie, multiplied by vector instructions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Direct<S>(pub(crate) S);

impl<S: Simd> Tiles for Direct<S> {
    type Simd = S;
    type Left = Strided;
    type Right = Rows;
    type Session = ();

    fn simd(self) -> S {
        self.0
    }

    fn session(self) {}

    fn left_room(_: usize, _: usize) -> usize {
        0
    }

    fn right_room(_: usize, _: usize) -> usize {
        0
    }

    #[inline(always)]
    unsafe fn left(self, matrix: Strided, _: usize, _: usize, _: *mut f32) -> Strided {
        matrix
    }

    #[inline(always)]
    unsafe fn right(self, matrix: Rows, _: usize, _: usize, _: *mut f32) -> Rows {
        matrix
    }

    #[inline(always)]
    unsafe fn multiply(self, work: Multiply<Strided, Rows>) {
        let Multiply { target, mut keep, left, right, size, terms, ahead } = work;
        let piece = if S::FUSED { size.piece } else { size.piece / 2 };
        let mut done = 0;
        loop {
            let k = (size.k - done).min(piece);
            // SAFETY: parts of operands that the caller vouches for.
            let (left, right) = unsafe { (left.at(0, done), right.at(done, 0)) };
            let ahead = ahead.share(done, done + k, size.k);
            let operands = Operands { target, left, right, size: Size { k, ..size }, ahead };
            match keep {
                Keep::Nothing => self.product(operands, Overwrite, terms),
                Keep::All => self.product(operands, Add, terms),
                Keep::Scaled(factors) => self.product(operands, Scale(factors), terms),
            }
            keep = Keep::All;
            done += k;
            if done >= size.k {
                break;
            }
        }
    }
}

impl<S: Simd> Direct<S> {
    #[inline(always)]
    fn product(self, operands: Operands, keep: impl Meet, terms: Terms) {
        match terms {
            Terms::All => self.0.call(Product::<_, NEITHER> { operands, keep }),
            Terms::LeftNotZero => self.0.call(Product::<_, LEFT> { operands, keep }),
            Terms::RightNotZero => self.0.call(Product::<_, RIGHT> { operands, keep }),
        }
    }
}

/// The operand whose zeros a [`Product`] leaves out.
const NEITHER: u8 = 0;
const LEFT: u8 = 1;
const RIGHT: u8 = 2;

#[derive(Clone, Copy)]
struct Operands {
    target: Rows,
    left: Strided,
    right: Rows,
    size: Size,
    ahead: Ahead,
}

/// How a register tile meets the target.
trait Meet: Copy {
    /// The new row of `N` vectors at `target`, given its sums.
    ///
    /// # Safety
    ///
    /// `target` must be readable, and there must be a factor for each column.
    unsafe fn meet<S: Simd>(self, simd: S, target: *const f32, column: usize, sum: S::F) -> S::F;
}

#[derive(Clone, Copy)]
struct Overwrite;
#[derive(Clone, Copy)]
struct Add;
#[derive(Clone, Copy)]
struct Scale(*const f32);

impl Meet for Overwrite {
    #[inline(always)]
    unsafe fn meet<S: Simd>(self, _: S, _: *const f32, _: usize, sum: S::F) -> S::F {
        sum
    }
}

impl Meet for Add {
    #[inline(always)]
    unsafe fn meet<S: Simd>(self, simd: S, target: *const f32, _: usize, sum: S::F) -> S::F {
        // SAFETY: the caller says so.
        simd.add(unsafe { simd.load(target) }, sum)
    }
}

impl Meet for Scale {
    #[inline(always)]
    unsafe fn meet<S: Simd>(self, simd: S, target: *const f32, column: usize, sum: S::F) -> S::F {
        // SAFETY: the caller says so.
        unsafe { simd.fma(simd.load(target), simd.load(self.0.add(column)), sum) }
    }
}

struct Product<K, const SKIP: u8> {
    operands: Operands,
    keep: K,
}

impl<K: Meet, const SKIP: u8> Operation for Product<K, SKIP> {
    type Output = ();

    /// Panels of four, two and one vectors; the rows of a register tile are what then fits.
    #[inline(always)]
    fn eval<S: Simd>(self, simd: S) {
        let vectors = self.operands.size.n / S::WIDTH;
        debug_assert_eq!(self.operands.size.n % S::WIDTH, 0);
        let mut vector = 0;
        // SAFETY: the panels are parts of matrices that the caller of `multiply` vouches for.
        unsafe {
            if S::REGISTERS >= 32 {
                while vector + 4 <= vectors {
                    self.panel::<S, 6, 4>(simd, vector);
                    vector += 4;
                }
            }
            while vector + 2 <= vectors {
                match S::REGISTERS >= 32 {
                    true => self.panel::<S, 12, 2>(simd, vector),
                    false => self.panel::<S, 6, 2>(simd, vector),
                }
                vector += 2;
            }
            if vector < vectors {
                match S::REGISTERS >= 32 {
                    true => self.panel::<S, 16, 1>(simd, vector),
                    false => self.panel::<S, 12, 1>(simd, vector),
                }
            }
        }
    }
}

impl<K: Meet, const SKIP: u8> Product<K, SKIP> {
    /// All rows of `N` vectors of columns.
    #[inline(always)]
    unsafe fn panel<S: Simd, const M: usize, const N: usize>(&self, simd: S, vector: usize) {
        let mut row = 0;
        let m = self.operands.size.m;
        // SAFETY: rows stay below `m`.
        unsafe {
            while row + M <= m {
                self.tile::<S, M, N>(simd, row, vector);
                row += M;
            }
            while row + 4 <= m {
                self.tile::<S, 4, N>(simd, row, vector);
                row += 4;
            }
            match m - row {
                3 => self.tile::<S, 3, N>(simd, row, vector),
                2 => self.tile::<S, 2, N>(simd, row, vector),
                1 => self.tile::<S, 1, N>(simd, row, vector),
                _ => {}
            }
        }
    }

    /// `M` rows of `N` vectors, their sums in registers.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize, const N: usize>(
        &self,
        simd: S,
        row: usize,
        vector: usize,
    ) {
        let Operands { target, left, right, size, ahead } = self.operands;
        // SAFETY: rows, columns and steps stay within the sizes that the caller vouches for.
        unsafe {
            let column = vector * S::WIDTH;
            let mut at = Reader::new(left.at(row, 0), right.at(0, column));
            let mut sums = [[simd.splat(0.0); N]; M];
            let turns = size.k / 4;
            if ahead.rows > 0 && vector == 0 {
                let mut ahead = ahead.share(row, row + M, size.m);
                let rows = ahead.rows.div_ceil(turns.max(1));
                for _ in 0..turns {
                    ahead.next(simd, rows);
                    for _ in 0..4 {
                        at.step::<S, M, N, SKIP>(simd, &mut sums);
                    }
                }
            } else {
                // Four steps a turn: the loop is short enough for its end to be foreseen.
                for _ in 0..turns {
                    at.step::<S, M, N, SKIP>(simd, &mut sums);
                    at.step::<S, M, N, SKIP>(simd, &mut sums);
                    at.step::<S, M, N, SKIP>(simd, &mut sums);
                    at.step::<S, M, N, SKIP>(simd, &mut sums);
                }
            }
            for _ in 0..size.k % 4 {
                at.step::<S, M, N, SKIP>(simd, &mut sums);
            }
            for m in 0..M {
                let target = target.at(row + m, column).first;
                for n in 0..N {
                    let at = target.add(n * S::WIDTH);
                    let sum = self.keep.meet(simd, at, column + n * S::WIDTH, sums[m][n]);
                    simd.store(at, sum);
                }
            }
        }
    }
}

/// Walks along `k`.
struct Reader {
    /// Four rows a pointer: an address is then a pointer, or one plus a stride times 1, 2 or 3.
    left: [*const f32; 4],
    row: isize,
    column: isize,
    right: *const f32,
    right_row: usize,
}

impl Reader {
    #[inline(always)]
    fn new(left: Strided, right: Rows) -> Self {
        let group = |group: isize| left.first.wrapping_offset(4 * group * left.row);
        Reader {
            left: [group(0), group(1), group(2), group(3)],
            row: left.row,
            column: left.column,
            right: right.first,
            right_row: right.row,
        }
    }

    /// Adds one column of the left times one row of the right, and moves on.
    #[inline(always)]
    unsafe fn step<S: Simd, const M: usize, const N: usize, const SKIP: u8>(
        &mut self,
        simd: S,
        sums: &mut [[S::F; N]; M],
    ) {
        // SAFETY: the caller's matrices have this row and column.
        unsafe {
            let mut vectors = [simd.splat(0.0); N];
            for n in 0..N {
                vectors[n] = simd.load(self.right.add(n * S::WIDTH));
            }
            for m in 0..M {
                let x = *self.left[m / 4].offset((m % 4) as isize * self.row);
                if SKIP == LEFT && x == 0.0 {
                    continue;
                }
                let x = simd.splat(x);
                for n in 0..N {
                    let sum = simd.fma(x, vectors[n], sums[m][n]);
                    sums[m][n] = match SKIP {
                        RIGHT => simd.select(is_zero(simd, vectors[n]), sums[m][n], sum),
                        _ => sum,
                    };
                }
            }
            for left in &mut self.left[..M.div_ceil(4)] {
                *left = left.wrapping_offset(self.column);
            }
            self.right = self.right.wrapping_add(self.right_row);
        }
    }
}

/// Where a vector is 0; not where it is NaN.
#[inline(always)]
fn is_zero<S: Simd>(simd: S, x: S::F) -> S::M {
    const LEAST: f32 = f32::from_bits(1);
    simd.less(simd.abs(x), simd.splat(LEAST))
}
