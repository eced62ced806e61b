//! Rotary positions (arXiv 2104.09864), with gradients.
//!
//! A head's numbers `j` and `j + d/2` are turned together by the angle `n · base^(−2j/d)`, `n` the
//! position. So the product of a query and a key depends on their distance alone. The gradient is
//! the arriving one, turned back.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use crate::rows::{self, PIECE};

/// Turns the numbers of heads by their positions.
#[derive(Debug)]
pub(crate) struct Rotary {
    base: f64,
    /// For the longest sequence so far.
    table: Mutex<Arc<Table>>,
}

/// Cosine and sine of every angle, `[token, pair]`.
#[derive(Debug, Default)]
struct Table {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

#[derive(Debug, Clone, Copy)]
enum Direction {
    Forth,
    Back,
}

struct Rotate {
    table: Arc<Table>,
    /// Of each token of each batch entry, where they aren't their numbers.
    positions: Option<Arc<[usize]>>,
    direction: Direction,
}

impl Rotary {
    /// For heads of `dim` numbers, which has to be even.
    pub(crate) fn new(dim: usize, base: f64) -> Result<Self> {
        if dim == 0 || !dim.is_multiple_of(2) {
            bail!("rotary positions with a head dim of {dim}, expected an even number")
        }
        if !(base.is_finite() && base > 1.0) {
            bail!("rotary positions with base {base}, expected a finite number over 1")
        }
        let table = Table { half: dim / 2, ..Table::default() };
        Ok(Rotary { base, table: Mutex::new(Arc::new(table)) })
    }

    /// `x` is `(batch, tokens, heads, dim)`, its tokens at the given positions, `[batch, token]`, or
    /// from 0 on.
    pub(crate) fn forward(&self, x: &Tensor, positions: Option<Arc<[usize]>>) -> Result<Tensor> {
        let (_, tokens, _, dim) = x.dims4()?;
        let table = self.table(tokens);
        if dim != 2 * table.half {
            bail!("rotary positions for a head dim of {}, got {dim}", 2 * table.half)
        }
        let op = Rotate { table, positions, direction: Direction::Forth };
        rows::in_f32("rotary positions", x, |x| x.apply_op1(op))
    }

    fn table(&self, tokens: usize) -> Arc<Table> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.cos.len() < tokens * table.half {
            *table = Arc::new(Table::new(tokens, table.half, self.base));
        }
        table.clone()
    }
}

impl Table {
    fn new(tokens: usize, half: usize, base: f64) -> Self {
        let speeds: Vec<f64> =
            (0..half).map(|pair| base.powf(-(pair as f64) / half as f64)).collect();
        let angles = (0..tokens)
            .flat_map(|token| speeds.iter().map(move |speed| (token as f64 * speed).sin_cos()));
        let (sin, cos) = angles.map(|(sin, cos)| (sin as f32, cos as f32)).unzip();
        Table { half, cos, sin }
    }
}

impl Rotate {
    fn turn(&self, x: &[f32], tokens: usize, heads: usize) -> Vec<f32> {
        let Table { half, cos, sin } = &*self.table;
        let (half, size) = (*half, heads * 2 * self.table.half);
        let sign = match self.direction {
            Direction::Forth => 1.0,
            Direction::Back => -1.0,
        };
        let mut y = vec![0.0; x.len()];
        let pieces = y.par_chunks_mut(PIECE * size).zip(x.par_chunks(PIECE * size));
        pieces.enumerate().for_each(|(piece, (y, x))| {
            let rows = y.chunks_exact_mut(size).zip(x.chunks_exact(size));
            for (row, (y, x)) in rows.enumerate() {
                let row = piece * PIECE + row;
                let position = self.positions.as_ref().map_or(row % tokens, |all| all[row]);
                let first = position * half;
                let (cos, sin) = (&cos[first..first + half], &sin[first..first + half]);
                for (y, x) in y.chunks_exact_mut(2 * half).zip(x.chunks_exact(2 * half)) {
                    let ((low, high), (left, right)) = (y.split_at_mut(half), x.split_at(half));
                    for pair in 0..half {
                        let (cos, sin) = (cos[pair], sign * sin[pair]);
                        low[pair] = left[pair] * cos - right[pair] * sin;
                        high[pair] = right[pair] * cos + left[pair] * sin;
                    }
                }
            }
        });
        y
    }
}

impl CustomOp1 for Rotate {
    fn name(&self) -> &'static str {
        "longspan rotary positions"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, tokens, heads, _) = layout.shape().dims4()?;
        let x = rows::numbers(x, layout)?;
        // There is no row to turn, nor a size to cut rows by.
        let y = if x.is_empty() { Vec::new() } else { self.turn(x, tokens, heads) };
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let (table, positions) = (self.table.clone(), self.positions.clone());
        let back = Rotate { table, positions, direction: Direction::Back };
        Ok(Some(dy.contiguous()?.apply_op1_no_bwd(&back)?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// By hand: with `d = 2` there is one pair, which turns by one radian per token.
    #[test]
    fn one_pair() -> Result<()> {
        let rotary = Rotary::new(2, 10_000.0)?;
        let x = Var::new(&[[[[1_f32, 2.0]], [[1.0, 2.0]], [[1.0, 2.0]]]], &Device::Cpu)?;
        let y = rotary.forward(&x, None)?;
        // What arrives is 1 and 10 for each token.
        let weights = Tensor::new(&[1_f32, 10.0], &Device::Cpu)?;
        let gradients = y.broadcast_mul(&weights)?.sum_all()?.backward()?;
        let (y, dx) = (y.flatten_all()?.to_vec1::<f32>()?, gradients.get(&x).expect("a gradient"));
        let dx = dx.flatten_all()?.to_vec1::<f32>()?;
        for token in 0..3 {
            let (sin, cos) = (token as f32).sin_cos();
            let near = |found: f32, expected: f32| (found - expected).abs() < 2e-6;
            assert!(near(y[2 * token], cos - 2.0 * sin), "{y:?}");
            assert!(near(y[2 * token + 1], 2.0 * cos + sin), "{y:?}");
            assert!(near(dx[2 * token], cos + 10.0 * sin), "{dx:?}");
            assert!(near(dx[2 * token + 1], 10.0 * cos - sin), "{dx:?}");
        }
        Ok(())
    }

    /// More rows than a piece and several batch entries: every token is turned by its own position,
    /// whatever the longest sequence was before.
    #[test]
    fn rows_find_their_positions() -> Result<()> {
        let rotary = Rotary::new(4, 100.0)?;
        let tokens = 150;
        let ones = |tokens| Tensor::ones((2, tokens, 3, 4), candle_core::DType::F32, &Device::Cpu);
        rotary.forward(&ones(tokens + 20)?, None)?;
        let y = rotary.forward(&ones(tokens)?, None)?;
        for entry in 0..2 {
            for (token, heads) in y.get(entry)?.to_vec3::<f32>()?.into_iter().enumerate() {
                for head in heads {
                    for (pair, speed) in [1.0, 0.1].into_iter().enumerate() {
                        let (sin, cos) = (token as f64 * speed).sin_cos();
                        assert!((f64::from(head[pair]) - (cos - sin)).abs() < 1e-6);
                        assert!((f64::from(head[pair + 2]) - (cos + sin)).abs() < 1e-6);
                    }
                }
            }
        }
        Ok(())
    }
}
