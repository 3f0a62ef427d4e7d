//! Charts of pages, as SVG: lines over an axis, and bars.

use maud::{Markup, html};

/// Colours of lines, told apart in light and in dark.
const COLOURS: [&str; 9] =
    ["#4c78d8", "#e4723a", "#2f9e6e", "#b0518f", "#c9a227", "#3aa6b9", "#8a6fd1", "#8c8c8c", "#d1495b"];

/// A line of a [`Chart`].
pub struct Line {
    pub name: String,
    pub points: Vec<Point>,
}

/// A point of a line, and how far the values spread that it is the mean of.
#[derive(Clone, Copy)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    pub low: f64,
    pub high: f64,
}

/// Whether points are marked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Marks {
    /// With a circle that says its values when pointed at.
    Circles,
    /// Only the line is drawn.
    #[cfg_attr(not(feature = "train"), allow(dead_code))]
    None,
}

/// Lines over one axis.
pub struct Chart<'a> {
    /// What it shows, for readers who do not see it.
    pub label: &'a str,
    /// What the numbers below count.
    pub x: &'a str,
    /// Digits after the point on the left.
    pub digits: usize,
    pub marks: Marks,
    /// A value to compare with, which is drawn with its name. The axis then begins at 0, so that
    /// distances can be judged.
    pub reference: Option<(f64, &'a str)>,
    pub lines: Vec<Line>,
}

impl Chart<'_> {
    /// The chart as an SVG.
    pub fn svg(&self) -> Markup {
        let all = || self.lines.iter().flat_map(|line| &line.points);
        let (first, last) = range(all().map(|point| point.x));
        let compared = self.reference.iter().flat_map(|(value, _)| [0.0, *value]);
        let (least, most) = range(all().flat_map(|point| [point.low, point.high]).chain(compared));
        let margin = 0.05 * (most - least);
        let bottom = if self.reference.is_some() { least } else { least - margin };
        let top = most + margin;
        let x = |at: f64| 100.0 + 660.0 * (at - first) / (last - first);
        let y = |at: f64| 260.0 - 230.0 * (at - bottom) / (top - bottom);
        let place = |at: f64, value: f64| format!("{:.1},{:.1}", x(at), y(value));
        let digits = self.digits;
        html! {
            svg viewBox="0 0 800 292" role="img" aria-label=(self.label) {
                @for i in 0..=4 {
                    @let value = bottom + (top - bottom) * f64::from(i) / 4.0;
                    @let at = format!("{:.1}", y(value));
                    line class="axis" x1="100" x2="760" y1=(at) y2=(at) {}
                    text x="92" y=(format!("{:.1}", y(value) + 4.0)) text-anchor="end" { (format!("{value:.digits$}")) }
                }
                @if let Some((value, name)) = self.reference {
                    @let at = format!("{:.1}", y(value));
                    line class="reference" x1="100" x2="760" y1=(at) y2=(at) {}
                    text x="760" y=(format!("{:.1}", y(value) - 4.0)) text-anchor="end" { (name) }
                }
                text x="100" y="284" { (self.x) " " (first) }
                text x="760" y="284" text-anchor="end" { (last) }
                @for (i, Line { name, points }) in self.lines.iter().enumerate() {
                    @let colour = COLOURS[i % COLOURS.len()];
                    @if points.iter().any(|point| point.low < point.high) {
                        @let above = points.iter().map(|point| place(point.x, point.high));
                        @let below = points.iter().rev().map(|point| place(point.x, point.low));
                        polygon fill=(colour) fill-opacity="0.15"
                            points=(above.chain(below).collect::<Vec<_>>().join(" ")) {}
                    }
                    polyline fill="none" stroke=(colour) stroke-width="2"
                        points=(points.iter().map(|point| place(point.x, point.y)).collect::<Vec<_>>().join(" ")) {
                        title { (name) }
                    }
                    @for point in points.iter().filter(|_| self.marks == Marks::Circles) {
                        circle cx=(format!("{:.1}", x(point.x))) cy=(format!("{:.1}", y(point.y))) r="3" fill=(colour) {
                            title { (self.x) " " (point.x) " " (name) ": " (format!("{:.digits$}", point.y)) }
                        }
                    }
                }
            }
            // Outside of the picture, where it wraps on a narrow screen.
            ul class="legend" {
                @for (i, line) in self.lines.iter().enumerate() {
                    li { span style=(format!("background:{}", COLOURS[i % COLOURS.len()])) {} (line.name) }
                }
            }
        }
    }
}

/// The most bars that have room for their share in numbers.
const NUMBERED: usize = 12;

/// The most bars whose labels have room on a narrow screen; of more, every other label is left out
/// there.
const NARROW: usize = 9;

/// A bar for each count; labels where there is room.
pub fn bars(label: &str, counts: &[(String, u64)]) -> Markup {
    let most = counts.iter().map(|(_, n)| *n).max().unwrap_or(1).max(1);
    let total = counts.iter().map(|(_, n)| *n).sum::<u64>().max(1);
    let width = 740.0 / counts.len().max(1) as f64;
    let every = counts.len().div_ceil(NUMBERED).max(1);
    html! {
        svg viewBox="0 0 800 206" role="img" aria-label=(label) {
            @for (i, (name, n)) in counts.iter().enumerate() {
                @let (left, height) = (30.0 + width * i as f64, 144.0 * *n as f64 / most as f64);
                @let spare = counts.len() > NARROW && i / every % 2 == 1;
                @let share = 100.0 * *n as f64 / total as f64;
                @let middle = format!("{:.1}", left + width / 2.0);
                rect class="bar" x=(format!("{:.1}", left + width * 0.05)) y=(format!("{:.1}", 170.0 - height))
                    width=(format!("{:.1}", width * 0.9)) height=(format!("{height:.1}")) {
                    title { (name) ": " (format!("{share:.2} %")) }
                }
                @if counts.len() <= NUMBERED {
                    text class=[spare.then_some("spare")] x=(middle) y=(format!("{:.1}", 166.0 - height))
                        text-anchor="middle" { (format!("{share:.1} %")) }
                }
                @if i % every == 0 {
                    text class=[spare.then_some("spare")] x=(middle) y="194" text-anchor="middle" { (name) }
                }
            }
        }
    }
}

/// The smallest and the largest value, apart from each other even where there is one value or none.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (least, most) = values.fold((f64::MAX, f64::MIN), |(least, most), value| (least.min(value), most.max(value)));
    match least <= most {
        true => (least, most.max(least + 1e-6 * least.abs().max(1.0))),
        false => (0.0, 1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(lines: Vec<Line>) -> Chart<'static> {
        Chart { label: "Loss", x: "step", digits: 2, marks: Marks::Circles, reference: None, lines }
    }

    fn point(x: f64, y: f64) -> Point {
        Point { x, y, low: y, high: y }
    }

    #[test]
    fn a_chart_has_a_line_a_band_and_a_name_for_each() {
        let spread =
            Line { name: "a<b".into(), points: vec![Point { x: 0.0, y: 2.0, low: 1.0, high: 3.0 }, point(9.0, 1.0)] };
        let plain = Line { name: "c".into(), points: vec![point(0.0, 1.0)] };
        let svg = chart(vec![spread, plain]).svg().into_string();
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert_eq!(svg.matches("<polygon").count(), 1);
        assert_eq!(svg.matches("<circle").count(), 3);
        assert!(svg.contains("a&lt;b") && svg.contains("step 9 a&lt;b: 1.00") && !svg.contains("NaN"));
        assert!(!chart(vec![]).svg().into_string().contains("NaN"));
    }

    #[test]
    fn a_reference_is_drawn_and_the_axis_begins_at_zero() {
        let lines = vec![Line { name: "a".into(), points: vec![point(0.0, 0.091), point(1.0, 0.093)] }];
        let svg = Chart { reference: Some((0.095, "normal data")), ..chart(lines) }.svg().into_string();
        assert!(svg.contains("class=\"reference\"") && svg.contains(">normal data<"), "{svg}");
        assert!(svg.contains("<text x=\"92\" y=\"264.0\" text-anchor=\"end\">0.00</text>"), "{svg}");
    }

    #[test]
    fn few_bars_say_their_shares_and_many_do_not() {
        let counts = |n: usize| (0..n).map(|i| (format!("<{i}"), 1)).collect::<Vec<_>>();
        let few = bars("Codes \"x\"", &counts(4)).into_string();
        assert!(
            few.contains(">25.0 %<") && few.contains("&lt;3") && few.contains("aria-label=\"Codes &quot;x&quot;\"")
        );
        assert!(!bars("Scales", &counts(40)).into_string().contains(" %</text>"));
        assert!(!bars("None", &[]).into_string().contains("NaN"));
    }
}
