//! PNG and SVG files, pixel by pixel and element by element.

use std::collections::HashSet;
use std::path::Path;

use crate::{inspect, scratch};

type Color = [u8; 3];

const EMPTY: Color = [246, 247, 248];
const FULL: Color = [10, 76, 140];
const PARTIAL: Color = [240, 134, 20];
const FRAME: Color = [196, 201, 207];
/// Between the frame's outer edge and the first cell.
const INSET: usize = 6;

/// A decoded PNG file.
struct Image {
    width: usize,
    height: usize,
    pixels: Vec<Color>,
}

impl Image {
    fn read(path: &Path) -> Self {
        let file = std::io::BufReader::new(std::fs::File::open(path).expect("a file was written"));
        let mut decoder = png::Decoder::new(file);
        decoder.set_transformations(png::Transformations::EXPAND);
        let mut reader = decoder.read_info().expect("it is a PNG file");
        let mut bytes = vec![0; reader.output_buffer_size().expect("it has a size")];
        let info = reader.next_frame(&mut bytes).expect("it is whole");
        assert_eq!(info.color_type, png::ColorType::Rgb);
        Image {
            width: info.width as usize,
            height: info.height as usize,
            pixels: bytes[..info.buffer_size()].as_chunks().0.to_vec(),
        }
    }

    fn at(&self, x: usize, y: usize) -> Color {
        self.pixels[y * self.width + x]
    }

    /// Left, top, width and height of the cells: inside of the largest frame.
    fn cells(&self) -> (usize, usize, usize, usize) {
        let longest = |line: &[Color]| {
            let runs = line.chunk_by(|a, b| a == b).scan(0, |start, run| {
                let first = *start;
                *start += run.len();
                Some((run[0] == FRAME, run.len(), first))
            });
            runs.filter(|(frame, ..)| *frame)
                .map(|(_, len, start)| (len, start))
                .max()
                .unwrap_or((0, 0))
        };
        let lines: Vec<_> = self.pixels.chunks_exact(self.width).map(longest).collect();
        let (length, left) = *lines.iter().max().unwrap();
        let edges: Vec<_> = (0..self.height).filter(|&y| lines[y] == (length, left)).collect();
        let (top, bottom) = (edges[0], edges[edges.len() - 1] + 1);
        assert!(length > 2 * INSET && bottom > top + 2 * INSET, "no frame");
        (left + INSET, top + INSET, length - 2 * INSET, bottom - top - 2 * INSET)
    }
}

fn draw(pattern: &str, args: &[&str], name: &str) -> (Image, u64) {
    let path = scratch(name);
    let file = path.to_string_lossy();
    let arguments = [&[pattern, "--no-picture", "--png", &file], args].concat();
    let text = inspect(&arguments).printed();
    let image = Image::read(&path);
    let said = format!("({} × {})", image.width, image.height);
    assert!(text.contains(&said), "{said} not in {text}");
    (image, std::fs::metadata(&path).unwrap().len())
}

#[test]
fn few_tokens_show_every_pair() {
    let pattern = "causal & (window(40, 0) | sinks(4))";
    let (image, _) = draw(pattern, &["--tokens", "96", "--block", "16"], "pairs.png");
    let (left, top, width, height) = image.cells();
    // 96 cells and five gaps of two pixels between blocks.
    assert_eq!((width, height), (96 * 13 + 10, 96 * 13 + 10));
    let place = |token: usize| token * 13 + token / 16 * 2 + 7;
    let seen = |query: usize, key: usize| key <= query && (key + 40 >= query || key < 4);
    for query in 0..96 {
        for key in 0..96 {
            let (row, column) = (query / 16 * 16, key / 16 * 16);
            let block =
                (row..row + 16).flat_map(|q| (column..column + 16).map(move |k| seen(q, k)));
            let full = block.clone().all(|seen| seen);
            let skipped = !block.clone().any(|seen| seen);
            let pixel = image.at(left + place(key), top + place(query));
            let expected = match seen(query, key) {
                true if full => pixel == FULL,
                true => pixel == PARTIAL,
                // Masked, which is neither of the others.
                false if !skipped => ![FULL, PARTIAL, EMPTY].contains(&pixel),
                false => pixel == EMPTY,
            };
            assert!(expected, "query {query}, key {key}: {pixel:?}");
        }
    }
}

#[test]
fn blocks_have_their_colors() {
    let (image, bytes) = draw("causal", &["--tokens", "8192"], "blocks.png");
    let (left, top, width, height) = image.cells();
    assert_eq!((width, height), (1_280, 1_280));
    let mut diagonal = HashSet::new();
    for row in 0..128 {
        for column in 0..128 {
            let pixel = image.at(left + column * 10 + 5, top + row * 10 + 5);
            match row.cmp(&column) {
                std::cmp::Ordering::Less => assert_eq!(pixel, EMPTY, "({row}, {column})"),
                std::cmp::Ordering::Equal => _ = diagonal.insert(pixel),
                std::cmp::Ordering::Greater => assert_eq!(pixel, FULL, "({row}, {column})"),
            }
        }
    }
    // Half of the pairs of every diagonal block are active: one shade, between the pure ones.
    assert_eq!(diagonal.len(), 1);
    assert!(diagonal.iter().all(|[r, g, b]| *r > 200 && *g > 134 && *b < 200), "{diagonal:?}");
    assert!(bytes < 150_000, "{bytes} bytes");
}

#[test]
fn a_thin_window_in_million_tokens_is_line() {
    let pattern = "causal & (window(1024, 0) | sinks(64))";
    let (image, bytes) = draw(pattern, &["--tokens", "1M"], "million.png");
    let (left, top, width, height) = image.cells();
    assert_eq!((width, height), (1_280, 1_280));
    // Contrast with the background.
    let visible = |x: usize, y: usize| {
        let pixel = image.at(left + x, top + y);
        pixel.iter().zip(EMPTY).map(|(a, b)| a.abs_diff(b) as u32).sum::<u32>() > 150
    };
    for at in 0..1_280 {
        assert!(visible(at, at), "no window at {at}");
        assert!(visible(0, at), "no sinks at {at}");
    }
    let count = (0..1_280 * 1_280).filter(|i| visible(i % 1_280, i / 1_280)).count();
    assert!(count < 3 * 5 * 1_280, "{count} pixels, more than three cells per row");
    assert!(bytes < 150_000, "{bytes} bytes");
}

#[test]
fn each_layout_has_panel() {
    let heads = "heads([causal, full, causal, window(100, 100), butterfly(64)])";
    let path = scratch("panels.svg");
    let svg = ["--tokens", "2048", "--svg", &path.to_string_lossy()];
    let text = inspect(&[&[heads], &svg[..]].concat()).printed();
    assert!(text.contains("panels.svg"), "{text}");
    let texts = texts(&path);
    for title in ["heads 0, 2", "head 1", "head 3", "head 4"] {
        assert!(texts.iter().any(|text| text == title), "no {title}: {texts:?}");
    }
    assert_eq!(texts.iter().filter(|text| *text == "key position").count(), 4);

    inspect(&[&[heads, "--head", "4"], &svg[..]].concat()).printed();
    let texts = self::texts(&path);
    assert_eq!(texts[0], "butterfly(64)");
    assert_eq!(texts.iter().filter(|text| *text == "key position").count(), 1);
}

/// The pieces of text of an SVG file that parses.
fn texts(path: &Path) -> Vec<String> {
    let source = std::fs::read_to_string(path).expect("a file was written");
    assert!(source.len() < 1_000_000, "{} bytes", source.len());
    let document = roxmltree::Document::parse(&source).expect("it is XML");
    assert!(document.root_element().has_tag_name(("http://www.w3.org/2000/svg", "svg")));
    let elements = document.descendants().filter(|node| node.tag_name().name() == "text");
    elements.map(|node| node.text().unwrap_or("").trim().to_string()).collect()
}

#[test]
fn svg_has_title_axes_and_legend() {
    let path = scratch("blocks.svg");
    let pattern = "causal & (window(256, 0) | sinks(16))";
    inspect(&[pattern, "--tokens", "8192", "--svg", &path.to_string_lossy()]).printed();
    let texts = texts(&path);
    for text in [
        pattern,
        "8,192 tokens · blocks of 64 · 3.28 % of pairs active · 30.5× fewer than dense",
        "key position",
        "query position",
        "4,096",
        "Full block: every pair active",
        "Partial block: few to most pairs active",
        "block skipped",
    ] {
        assert!(texts.iter().any(|found| found == text), "no {text:?} in {texts:?}");
    }
    let source = std::fs::read_to_string(&path).unwrap();
    let document = roxmltree::Document::parse(&source).unwrap();
    let filled = |color: &str| {
        let is = |node: &roxmltree::Node<'_, '_>| node.attribute("fill") == Some(color);
        document.descendants().filter(is).count()
    };
    // Rows 1 to 127 have Full blocks; those of the first four rows are squares of their own, and
    // the legend has one more.
    assert!((125..=130).contains(&filled("#0a4c8c")), "{} Full", filled("#0a4c8c"));
}

#[test]
fn svg_stays_small() {
    for (pattern, tokens, name) in [
        ("random(16, 300, 600, 1)", "9600", "random.svg"),
        ("!strided(3) & random(16, 20, 40, 1)", "640", "pairs.svg"),
    ] {
        let path = scratch(name);
        let args = [pattern, "--tokens", tokens, "--block", "16", "--svg", &path.to_string_lossy()];
        inspect(&args).printed();
        let texts = texts(&path);
        assert_eq!(texts[0], pattern);
    }
}

#[test]
fn axes_note_offsets() {
    let path = scratch("decode.svg");
    let args = ["causal", "--tokens", "640", "--queries", "64", "--key-offset", "-100"];
    inspect(&[&args[..], &["--svg", &path.to_string_lossy()]].concat()).printed();
    let texts = texts(&path);
    for text in
        ["key index", "query index", "key position = index − 100", "query position = index + 476"]
    {
        assert!(texts.iter().any(|found| found == text), "no {text:?} in {texts:?}");
    }
}
