//! A picture of attention weights: a strip per row, darker where a weight is larger.

use longspan_pattern::Shade;
use longspan_pattern::svg::{Align, Svg, TextStyle, Turn};

use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::tensor::View;

/// Cells of a strip, at most; more keys share one, which shows the largest weight.
const CELLS: usize = 1_000;
/// Strips, at most: a picture of more is higher than a screen many times over.
const STRIPS: usize = 512;
/// Pixels of a strip, its height with the space below it, and of its label.
const WIDTH: f64 = 1_000.0;
const HEIGHT: f64 = 12.0;
const PITCH: f64 = 14.0;
const LABEL: f64 = 150.0;
const STYLE: TextStyle<'static> = TextStyle {
    family: "sans-serif",
    em: 11.0,
    rgb: [98, 104, 112],
    align: Align::Left,
    turn: Turn::Across,
};

/// The weights of [`Attention::attention_weights`](crate::Attention::attention_weights) as an SVG file:
/// a strip per batch entry, head and row, keys from left to right, at most 1,000 cells of the largest
/// weight among their keys.
///
/// The darkest shade is that of a row's largest weight; each lighter one is a factor of 4 below, the
/// lightest is all that is smaller, and what is not seen is empty. Weights that are not finite are
/// orange. At most 512 rows.
///
/// ```
/// use longspan::{Dims, Order, Tensor, weights_svg};
///
/// let dims = Dims { batch: 1, heads: 1, tokens: 1, dim: 4 };
/// let weights = Tensor::new(vec![0.5, 0.5, 0.0, 0.0], dims, Order::Bhsd)?;
/// let svg = weights_svg(weights.view())?;
/// assert!(svg.starts_with("<svg") && svg.contains("weights over 4 keys"));
/// # Ok::<_, longspan::Error>(())
/// ```
pub fn weights_svg(weights: View<'_, f32>) -> Result<String> {
    let Dims { batch, tokens, heads, dim: keys } = weights.dims();
    let rows = batch.saturating_mul(heads).saturating_mul(tokens);
    if rows > STRIPS {
        return Err(Error::Shape {
            tensor: "the picture of weights",
            axis: "rows",
            got: rows,
            expected: STRIPS,
            why: "at most: draw fewer batch entries, heads or queries",
        });
    }
    let mut svg = Svg::default();
    let caption = format!(
        "weights over {keys} keys: the darkest are the largest of their row, each lighter shade is a \
         factor of 4"
    );
    svg.text((0.0, PITCH / 2.0), &caption, STYLE);
    let mut row = vec![0.0; keys];
    for strip in 0..rows {
        let (pair, token) = (strip / tokens, strip % tokens);
        let (entry, head) = (pair / heads, pair % heads);
        weights.copy_row(entry, token, head, &mut row);
        let top = PITCH * (strip + 1) as f64;
        let label = format!("batch {entry}, head {head}, row {token}");
        svg.text((0.0, top + HEIGHT / 2.0), &label, STYLE);
        draw(&row, top, &mut svg);
    }
    Ok(svg.file(LABEL + WIDTH, PITCH * (rows + 1) as f64))
}

/// Draws a row from `top` on.
fn draw(row: &[f32], top: f64, svg: &mut Svg) {
    svg.rectangle([LABEL, top, WIDTH, HEIGHT], Shade::Empty.rgb());
    let cells = row.len().min(CELLS);
    let largest = row.iter().copied().fold(0.0, f32::max);
    let shades: Vec<Shade> = (0..cells)
        .map(|cell| {
            let keys = cell * row.len() / cells..(cell + 1) * row.len() / cells;
            let keys = &row[keys];
            if keys.iter().any(|weight| !weight.is_finite()) {
                return Shade::PARTIAL;
            }
            shade(keys.iter().copied().fold(0.0, f32::max), largest)
        })
        .collect();
    let mut first = 0;
    for run in shades.chunk_by(|a, b| a == b) {
        if run[0] != Shade::Empty {
            let at = |cell: usize| LABEL + WIDTH * cell as f64 / cells as f64;
            let width = at(first + run.len()) - at(first);
            svg.rectangle([at(first), top, width, HEIGHT], run[0].rgb());
        }
        first += run.len();
    }
}

/// The shade of a weight in a row with that largest one.
fn shade(weight: f32, largest: f32) -> Shade {
    if weight == 0.0 {
        return Shade::Empty;
    }
    let below = ((largest / weight).log2() / 2.0).min(f32::from(Shade::LEVELS - 1));
    Shade::Full(Shade::LEVELS - below as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dims::Order;
    use crate::tensor::Tensor;

    #[test]
    fn shades_are_factors_of_four() {
        for (weight, expected) in [
            (0.5, Shade::FULL),
            (0.2, Shade::FULL),
            (0.12, Shade::Full(Shade::LEVELS - 1)),
            (0.5 / 4096.0, Shade::Full(2)),
            (f32::MIN_POSITIVE, Shade::Full(1)),
            (0.0, Shade::Empty),
        ] {
            assert_eq!(shade(weight, 0.5), expected, "{weight}");
        }
    }

    /// Rectangles of the picture of one row, without its background: left edge and width in cells.
    fn rectangles(row: Vec<f32>) -> Vec<(f64, f64, String)> {
        let dims = Dims { batch: 1, tokens: 1, heads: 1, dim: row.len() };
        let cells = row.len().min(CELLS) as f64;
        let weights = Tensor::new(row, dims, Order::Bhsd).unwrap();
        let svg = weights_svg(weights.view()).unwrap();
        let number = |line: &str, name: &str| -> f64 {
            let (_, rest) = line.split_once(&format!(" {name}=\"")).unwrap();
            rest.split_once("\"").unwrap().0.parse().unwrap()
        };
        let rectangles = svg.lines().filter(|line| line.starts_with("<rect")).skip(1);
        rectangles
            .map(|line| {
                let (x, width) = (number(line, "x"), number(line, "width"));
                let color = line.split_once("fill=").unwrap().1.to_owned();
                ((x - LABEL) / WIDTH * cells, width / WIDTH * cells, color)
            })
            .collect()
    }

    /// No single key is lost among a hundred thousand.
    #[test]
    fn cells_have_the_largest_of_their_keys() {
        let mut row = vec![0.0; 100_000];
        (row[0], row[50_050], row[99_999]) = (1.0, 1.0, 1.0);
        let at: Vec<f64> = rectangles(row).iter().map(|(x, ..)| x.round()).collect();
        assert_eq!(at, [0.0, 500.0, 999.0]);
    }

    #[test]
    fn equal_neighbors_are_one_rectangle() {
        let drawn = rectangles(vec![0.0, 0.25, 0.25, 0.25, f32::NAN, 0.0]);
        let [(first, width, color), (nan, _, other)] = &drawn[..] else { panic!("{drawn:?}") };
        assert_eq!((first.round(), width.round(), nan.round()), (1.0, 3.0, 4.0));
        assert_ne!(color, other);
        assert!(rectangles(vec![]).is_empty());
    }

    #[test]
    fn too_many_rows_are_refused() {
        let dims = Dims { batch: 2, tokens: 129, heads: 2, dim: 1 };
        let weights = Tensor::<f32>::zeros(dims, Order::Bhsd).unwrap();
        let error = weights_svg(weights.view()).unwrap_err().to_string();
        assert!(error.contains("rows 516, expected 512 (at most: draw fewer"), "{error}");
    }
}
