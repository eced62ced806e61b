//! SVG files of rectangles and text, for the pictures of the command line and of Python. Imports
//! nothing.

use std::fmt::Write;

/// The items of a picture; later ones cover earlier ones. Coordinates are pixels.
///
/// ```
/// let mut svg = longspan_pattern::svg::Svg::default();
/// svg.rectangle([0.0, 0.0, 20.0, 10.0], [10, 76, 140]);
/// assert!(svg.file(20.0, 10.0).contains("width=\"20\" height=\"10\" fill=\"#0a4c8c\"/>"));
/// ```
#[derive(Debug, Default)]
pub struct Svg {
    items: String,
    /// The first line of text, escaped.
    title: String,
}

/// Size, font and place of a line of text.
#[derive(Debug, Clone, Copy)]
pub struct TextStyle<'a> {
    /// Families in order of preference, as CSS lists them.
    pub family: &'a str,
    /// Pixels per em.
    pub em: f64,
    /// Red, green, blue.
    pub rgb: [u8; 3],
    /// The part of the text that is at its point.
    pub align: Align,
    /// Its direction.
    pub turn: Turn,
}

/// The part of a line of text that is at its point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// The start.
    Left,
    /// The middle.
    Center,
    /// The end.
    Right,
}

/// Direction of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// From left to right.
    Across,
    /// From bottom to top.
    Up,
}

impl Svg {
    /// Fills a rectangle.
    pub fn rectangle(&mut self, [x, y, width, height]: [f64; 4], [r, g, b]: [u8; 3]) {
        // Writing to a string does not fail.
        let _ = writeln!(
            self.items,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" \
             fill=\"#{r:02x}{g:02x}{b:02x}\"/>"
        );
    }

    /// Writes a line of text, vertically centered on its point.
    pub fn text(&mut self, (x, y): (f64, f64), text: &str, style: TextStyle<'_>) {
        let TextStyle { family, em, rgb: [r, g, b], align, turn } = style;
        let anchor = match align {
            Align::Left => "start",
            Align::Center => "middle",
            Align::Right => "end",
        };
        let turn = match turn {
            Turn::Across => String::new(),
            Turn::Up => format!(" transform=\"rotate(270 {x} {y})\""),
        };
        let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        if self.title.is_empty() {
            self.title.clone_from(&text);
        }
        let _ = writeln!(
            self.items,
            "<text x=\"{x}\" y=\"{y}\" dy=\"0.5ex\" text-anchor=\"{anchor}\" \
             font-family=\"{family}\" font-size=\"{em}\" fill=\"#{r:02x}{g:02x}{b:02x}\"{turn}>\
             {text}</text>"
        );
    }

    /// The file, of a picture of that size; its title, which screen readers say, is its first line
    /// of text.
    pub fn file(&self, width: f64, height: f64) -> String {
        // Cells touch: smoothing their edges would leave seams between them.
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" shape-rendering=\"crispEdges\" role=\"img\">\n\
             <title>{}</title>\n{}</svg>\n",
            self.title, self.items
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_and_turned() {
        let style = TextStyle {
            family: "monospace",
            em: 12.5,
            rgb: [255, 0, 1],
            align: Align::Right,
            turn: Turn::Up,
        };
        let mut svg = Svg::default();
        svg.text((3.0, 4.0), "a & <b>", style);
        assert_eq!(
            svg.items,
            "<text x=\"3\" y=\"4\" dy=\"0.5ex\" text-anchor=\"end\" font-family=\"monospace\" \
             font-size=\"12.5\" fill=\"#ff0001\" transform=\"rotate(270 3 4)\">\
             a &amp; &lt;b&gt;</text>\n"
        );
        svg.text((0.0, 0.0), "c", style);
        assert!(svg.file(1.0, 1.0).contains("role=\"img\">\n<title>a &amp; &lt;b&gt;</title>\n"));
    }
}
