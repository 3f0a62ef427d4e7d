//! Pages that commands write with `--report`: one file, no scripts, nothing from the network, light and dark, wide and narrow.

use anyhow::{Context, Result, ensure};
use nvfp4_files::durable;
use std::fmt::Write;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Colours of lines, told apart in light and in dark.
const COLOURS: [&str; 9] =
    ["#4c78d8", "#e4723a", "#2f9e6e", "#b0518f", "#c9a227", "#3aa6b9", "#8a6fd1", "#8c8c8c", "#d1495b"];

const STYLE: &str = "
:root { color-scheme: light dark; --text: #1d2330; --soft: #667085; --line: #d9dde5; --back: #ffffff; --bar: #4c78d8 }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --soft: #98a2b3; --line: #333a47; --back: #14171d; --bar: #7aa2ff } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 60rem; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums }
td, th { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line) }
td:first-child, th:first-child { text-align: left; min-width: 14rem }
.wide { overflow-x: auto } svg { width: 100%; min-width: 34rem; height: auto } svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
.axis { stroke: var(--line) } .bar { fill: var(--bar) } p, li { color: var(--text) } .soft { color: var(--soft) }";

/// Says in a page that it is one of these.
const MARK: &str = "<meta name=\"generator\" content=\"nvfp4\">";

/// What a page may take the place of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Replaces {
    /// An earlier page.
    Pages,
    /// Any file.
    Files,
}

/// An error where a page cannot be written, before there is anything to write. None of the folders or files in `apart` may hold it.
pub fn check(path: &Path, replaces: Replaces, apart: &[(&str, &Path)]) -> Result<()> {
    let folder = durable::parent(path);
    ensure!(folder.is_dir(), "--report {}: there is no folder {}", path.display(), folder.display());
    ensure!(!path.is_dir(), "--report {}: this is a folder; name a file in it", path.display());
    ensure!(path.is_file() || !path.exists(), "--report {}: this is not a file; name one", path.display());
    // A link is where it is, and where it leads.
    let places = |path: &Path| -> Vec<PathBuf> {
        let here =
            durable::parent(path).canonicalize().ok().zip(path.file_name()).map(|(parent, name)| parent.join(name));
        here.into_iter().chain(path.canonicalize().ok()).collect()
    };
    let page = places(path);
    for (name, other) in apart {
        let inside = places(other).iter().any(|other| page.iter().any(|page| page.starts_with(other)));
        ensure!(!inside, "--report {}: this is in the {name}; name a file elsewhere", path.display());
    }
    ensure!(
        replaces == Replaces::Files || path.symlink_metadata().is_err() || is_page(path),
        "--report {}: there is a file that is not a report; name another",
        path.display()
    );
    Ok(())
}

/// The files of a folder, and the links to files, at any depth.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let (mut files, mut open) = (Vec::new(), vec![folder.to_path_buf()]);
    while let Some(folder) = open.pop() {
        for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
            match path.is_dir() {
                true if path.is_symlink() => {}
                true => open.push(path),
                false => files.push(path),
            }
        }
    }
    files
}

/// Whether a file is a page.
fn is_page(path: &Path) -> bool {
    let mut start = Vec::new();
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file())
        && File::open(path).and_then(|file| file.take(1024).read_to_end(&mut start)).is_ok()
        && String::from_utf8_lossy(&start).contains(MARK)
}

/// Writes a page.
pub fn write(path: &Path, page: &str) -> Result<()> {
    durable::write(path, page.as_bytes()).with_context(|| format!("--report {}", path.display()))
}

/// A whole page: a title, a paragraph of HTML, and sections of HTML by name.
pub fn page(title: &str, introduction: &str, sections: &[(&str, String)]) -> String {
    let title = escape(title);
    let body: String = sections
        .iter()
        .map(|(name, html)| format!("<section><h2>{name}</h2><div class=\"wide\">{html}</div></section>\n"))
        .collect();
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         {MARK}<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>{title}</title><style>{STYLE}</style></head><body>\n\
         <h1>{title}</h1>\n<p>{introduction}</p>\n{body}</body></html>\n"
    )
}

/// Text as HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

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

impl Point {
    /// A value that spreads nowhere.
    pub fn new(x: f64, y: f64) -> Self {
        Point { x, y, low: y, high: y }
    }
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
    pub lines: Vec<Line>,
}

impl Chart<'_> {
    /// The chart as an SVG.
    pub fn svg(&self) -> String {
        let all = || self.lines.iter().flat_map(|line| &line.points);
        let (first, last) = range(all().map(|point| point.x));
        let (least, most) = range(all().flat_map(|point| [point.low, point.high]));
        let (bottom, top) = (least - 0.05 * (most - least), most + 0.05 * (most - least));
        let x = |at: f64| 60.0 + 700.0 * (at - first) / (last - first);
        let y = |at: f64| 260.0 - 230.0 * (at - bottom) / (top - bottom);
        let digits = self.digits;
        let height = 310 + 20 * self.lines.len().div_ceil(3);
        let mut svg = format!("<svg viewBox=\"0 0 800 {height}\" role=\"img\" aria-label=\"{}\">", self.label);
        for i in 0..=4 {
            let value = bottom + (top - bottom) * f64::from(i) / 4.0;
            let at = y(value);
            let _ = write!(
                svg,
                "<line class=\"axis\" x1=\"60\" x2=\"760\" y1=\"{at:.1}\" y2=\"{at:.1}\"/><text x=\"8\" y=\"{:.1}\">{value:.digits$}</text>",
                at + 4.0
            );
        }
        let _ = write!(
            svg,
            "<text x=\"60\" y=\"282\">{} {first}</text><text x=\"760\" y=\"282\" text-anchor=\"end\">{last}</text>",
            self.x
        );
        for (i, Line { name, points }) in self.lines.iter().enumerate() {
            let (colour, name) = (COLOURS[i % COLOURS.len()], escape(name));
            let place = |at: f64, value: f64| format!("{:.1},{:.1}", x(at), y(value));
            if points.iter().any(|point| point.low < point.high) {
                let above = points.iter().map(|point| place(point.x, point.high));
                let below = points.iter().rev().map(|point| place(point.x, point.low));
                let outline: Vec<String> = above.chain(below).collect();
                let _ =
                    write!(svg, "<polygon fill=\"{colour}\" fill-opacity=\"0.15\" points=\"{}\"/>", outline.join(" "));
            }
            let line: Vec<String> = points.iter().map(|point| place(point.x, point.y)).collect();
            let _ = write!(
                svg,
                "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{}\"><title>{name}</title></polyline>",
                line.join(" ")
            );
            for point in points.iter().filter(|_| self.marks == Marks::Circles) {
                let _ = write!(
                    svg,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"><title>{} {} {name}: {:.digits$}</title></circle>",
                    x(point.x),
                    y(point.y),
                    self.x,
                    point.x,
                    point.y
                );
            }
            let (left, down) = (60 + 235 * (i % 3), 306 + 20 * (i / 3));
            let _ = write!(
                svg,
                "<rect x=\"{left}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{colour}\"/><text x=\"{}\" y=\"{down}\">{name}</text>",
                down - 10,
                left + 18
            );
        }
        svg + "</svg>"
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

    #[test]
    fn a_chart_has_a_line_a_band_and_a_name_for_each() {
        let spread = Line {
            name: "a<b".into(),
            points: vec![Point { x: 0.0, y: 2.0, low: 1.0, high: 3.0 }, Point::new(9.0, 1.0)],
        };
        let plain = Line { name: "c".into(), points: vec![Point::new(0.0, 1.0)] };
        let chart = Chart { label: "Loss", x: "step", digits: 2, marks: Marks::Circles, lines: vec![spread, plain] };
        let svg = chart.svg();
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert_eq!(svg.matches("<polygon").count(), 1);
        assert_eq!(svg.matches("<circle").count(), 3);
        assert!(svg.contains("a&lt;b") && svg.contains("step 9 a&lt;b: 1.00") && !svg.contains("NaN"));
        assert!(!Chart { lines: vec![], ..chart }.svg().contains("NaN"));
    }
}
