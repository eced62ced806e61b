//! The timeline picture: per pass and rank, one lane for computing and one for messages.

use longspan_pattern::Shade;

use super::{PassPlan, Planned, Span, Timeline};
use crate::number::{count, shortened, time};
use crate::plot::{Align, Color, FAINT_INK, Face, INK, LINE, Scene, Type};

const MARGIN: i32 = 48;
/// Pixels per pass.
const LENGTH: i32 = 1_400;
/// Pixels of the rank labels.
const GUTTER: i32 = 150;
/// Heights of the two lanes of a rank, and of the gap below.
const COMPUTING: i32 = 30;
const MESSAGES: i32 = 14;
const GAP: i32 = 16;
/// Ranks that are drawn.
const MOST: usize = 8;
/// Time ticks.
const TICKS: i32 = 5;

const TITLE: f32 = 30.0;
const TEXT: f32 = 25.0;
const LABEL: f32 = 23.0;
const LINE_HEIGHT: i32 = 38;

/// The whole picture.
pub(super) fn compose(planned: &Planned) -> Scene {
    let mut scene = Scene::new();
    let width = GUTTER + LENGTH;
    let mut y = MARGIN;
    let title = Type::new(Face::Mono, TITLE, INK);
    for line in title.wrap(&shortened(&planned.sparsity, 400), width, 2) {
        scene.text(MARGIN, y + LINE_HEIGHT / 2, line, title);
        y += LINE_HEIGHT + 6;
    }
    let faint = Type::new(Face::Sans, TEXT, FAINT_INK);
    let tokens = count(planned.sizes.tokens, "token");
    let ranks = count(planned.sizes.ranks, "rank");
    let about =
        format!("{tokens} over {ranks}, {}, machine {}", planned.map.name(), planned.machine.name);
    scene.text(MARGIN, y + LINE_HEIGHT / 2, about, faint);
    y += LINE_HEIGHT + 20;
    for pass in &planned.passes {
        y = draw(&mut scene, pass, y);
    }
    let mut x = MARGIN;
    let meanings: [(Color, &str); 3] = [
        (Shade::FULL.into(), "computing"),
        (Shade::PARTIAL.into(), "messages under way"),
        (FAINT_INK, "packing and unpacking"),
    ];
    for (color, text) in meanings {
        scene.rectangle(x, y + 6, 26, 26, color);
        let set = Type::new(Face::Sans, TEXT, INK);
        scene.text(x + 38, y + LINE_HEIGHT / 2, text, set);
        x += 38 + set.width(text) + 44;
    }
    scene.width = width + 2 * MARGIN;
    scene.height = y + LINE_HEIGHT + MARGIN;
    scene
}

/// Draws one pass; returns the y coordinate of its end.
fn draw(scene: &mut Scene, pass: &PassPlan, top: i32) -> i32 {
    let all = pass.timelines.len();
    let shown = all.min(MOST);
    let slowest = pass.timelines.iter().position(|timeline| timeline.rank == pass.slowest().rank);
    // Evenly spaced, and the one that ends last.
    let mut drawn: Vec<_> =
        (0..shown).map(|n| if shown > 1 { n * (all - 1) / (shown - 1) } else { 0 }).collect();
    if let Some(slowest) = slowest.filter(|slowest| !drawn.contains(slowest)) {
        let nearest = (1..shown - 1).min_by_key(|&n| drawn[n].abs_diff(slowest)).unwrap_or(0);
        drawn[nearest] = slowest;
    }
    let whole = pass.slowest().end().max(f64::MIN_POSITIVE);
    let (left, mut y) = (MARGIN + GUTTER, top);
    let set = Type::new(Face::Sans, TEXT, INK);
    let heading = format!("{}: {}", pass.name, time(whole));
    scene.text(MARGIN, y + LINE_HEIGHT / 2, heading, set);
    y += LINE_HEIGHT;
    let bottom = y + shown as i32 * (COMPUTING + MESSAGES + GAP);
    let label = Type::new(Face::Sans, LABEL, INK);
    for tick in 0..=TICKS {
        let x = left + LENGTH * tick / TICKS;
        scene.rectangle(x - 1, y, 2, bottom - y, LINE);
        let text = time(whole * f64::from(tick) / f64::from(TICKS));
        scene.text(x, bottom + LINE_HEIGHT / 2, text, label.align(Align::Center));
    }
    for timeline in drawn.into_iter().map(|index| &pass.timelines[index]) {
        let name = format!("rank {}", timeline.rank);
        scene.text(left - 12, y + COMPUTING / 2, name, label.align(Align::Right));
        lanes(scene, timeline, whole, left, y);
        y += COMPUTING + MESSAGES + GAP;
    }
    bottom + LINE_HEIGHT + 28
}

fn lanes(scene: &mut Scene, timeline: &Timeline, whole: f64, left: i32, y: i32) {
    let spans = || timeline.spans.iter();
    // Packing ends where computing starts.
    let begun = |span: &Span| span.computed - span.computing;
    let handled = spans()
        .flat_map(|span| [(span.start, begun(span)), (span.arrived.max(span.computed), span.end)]);
    bars(scene, handled, whole, (left, y, COMPUTING), FAINT_INK);
    let computed = spans().map(|span| (begun(span), span.computed));
    bars(scene, computed, whole, (left, y, COMPUTING), Shade::FULL.into());
    let sent = spans().filter(|span| span.has_messages).map(|span| (begun(span), span.arrived));
    bars(scene, sent, whole, (left, y + COMPUTING, MESSAGES), Shade::PARTIAL.into());
}

/// Bars between two times; those within a pixel of each other are merged.
fn bars(
    scene: &mut Scene,
    times: impl Iterator<Item = (f64, f64)>,
    whole: f64,
    (left, top, height): (i32, i32, i32),
    color: Color,
) {
    let place = |time: f64| (time / whole * f64::from(LENGTH)).round() as i32;
    let mut last: Option<(i32, i32)> = None;
    let mut finish = |bar: Option<(i32, i32)>| {
        if let Some((from, to)) = bar.filter(|(from, to)| from < to) {
            scene.rectangle(left + from, top, to - from, height, color);
        }
    };
    for (from, to) in
        times.filter(|(from, to)| from < to).map(|(from, to)| (place(from), place(to)))
    {
        last = match last {
            Some((start, end)) if from <= end + 1 => Some((start, end.max(to))),
            other => {
                finish(other);
                Some((from, to))
            }
        };
    }
    finish(last);
}
