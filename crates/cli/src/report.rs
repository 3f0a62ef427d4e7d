//! `convert --report`: one page that says what a conversion did to the weights.

use crate::chart::{Chart, Line, Marks, Point, bars};
use crate::diff::NORMAL_DATA;
use crate::order;
use crate::page;
use crate::sizes;
use crate::sizes::counted;
use anyhow::Result;
use maud::{Markup, html};
use nvfp4_checkpoint::{Action, Finished, Measure, Plan, Statistics, Summary};
use nvfp4_spec::{e2m1, e4m3};
use std::collections::BTreeMap;
use std::path::Path;

/// What a page is about.
pub struct Subject<'s> {
    pub title: &'s str,
    /// How the checkpoint was made: what, and how it was chosen.
    pub made: Vec<(&'static str, String)>,
    pub plan: &'s Plan<'s>,
    pub summary: &'s Summary,
    pub statistics: &'s Statistics,
}

/// Writes the page.
pub fn write(path: &Path, subject: &Subject<'_>) -> Result<()> {
    page::write(path, &page(subject))
}

fn page(subject: &Subject<'_>) -> String {
    let Subject { title, made, plan, summary, statistics } = subject;
    let mut sections = Vec::new();
    if !summary.quantized.is_empty() {
        sections.push(("Relative error by layer and projection", layers(&summary.quantized)));
        sections.push(("Worst weights", worst(&summary.quantized)));
    }
    if !summary.rescaled.is_empty() {
        sections.push(("Joined weights with different tensor scales", rescaled(summary)));
    }
    sections.push(("Codes", codes(statistics)));
    sections.push(("Block scales", scales(statistics)));
    sections.push(("Kept as they were", kept(plan)));
    sections.push(("How it was made", settings(made)));
    page::page(&format!("{title} in NVFP4"), &introduction(summary), &sections)
}

fn settings(made: &[(&str, String)]) -> Markup {
    html! { table { @for (name, value) in made { tr { td { (name) } td { (value) } } } } }
}

fn introduction(summary: &Summary) -> String {
    let (before, after) = (sizes::show(summary.before), sizes::show(summary.after));
    if summary.quantized.is_empty() {
        return format!("NVFP4 already: no weight was quantized from plain numbers. {before} to {after}.");
    }
    let mut total = Measure::default();
    summary.quantized.iter().for_each(|w| total.add(&w.measure));
    let (count, error, sqnr) = (summary.quantized.len(), total.relative_error(), total.sqnr());
    format!(
        "{} quantized, {before} to {after}. Relative error {error:.4}, \
         SQNR {sqnr:.1} dB; NVFP4 of normal data has {NORMAL_DATA}.",
        counted(count, "weight")
    )
}

/// The number after `layers.` (or `layer.`, `h.`, `blocks.`) in a module's name.
fn layer(module: &str) -> Option<usize> {
    let mut parts = module.split('.');
    parts.by_ref().find(|p| ["layers", "layer", "h", "blocks"].contains(p))?;
    parts.next()?.parse().ok()
}

/// A line per projection over the layers: the mean of its weights in a layer, as of experts, and a
/// band of their errors.
fn layers(weights: &[Finished]) -> Markup {
    let mut lines: BTreeMap<&str, BTreeMap<usize, Vec<&Measure>>> = BTreeMap::new();
    for weight in weights {
        if let Some(layer) = layer(&weight.module) {
            let projection = weight.module.rsplit('.').next().unwrap_or_default();
            lines.entry(projection).or_default().entry(layer).or_default().push(&weight.measure);
        }
    }
    if lines.is_empty() {
        return html! { p class="soft" { "No weight has the number of a layer in its name." } };
    }
    let point = |(layer, measures): (&usize, &Vec<&Measure>)| {
        let mut total = Measure::default();
        measures.iter().for_each(|measure| total.add(measure));
        let errors = || measures.iter().map(|measure| measure.relative_error());
        let (low, high) = (errors().fold(f64::MAX, f64::min), errors().fold(0.0, f64::max));
        Point { x: *layer as f64, y: total.relative_error(), low, high }
    };
    let line = |(projection, errors): (&str, BTreeMap<usize, Vec<&Measure>>)| Line {
        name: projection.to_string(),
        points: errors.iter().map(point).collect(),
    };
    let lines = lines.into_iter().map(line).collect();
    Chart {
        label: "Relative error by layer",
        x: "layer",
        digits: 4,
        marks: Marks::Circles,
        reference: Some((NORMAL_DATA, "normal data")),
        lines,
    }
    .svg()
}

fn worst(weights: &[Finished]) -> Markup {
    let mut order: Vec<&Finished> = weights.iter().collect();
    order.sort_by(|a, b| b.measure.relative_error().total_cmp(&a.measure.relative_error()));
    let zeroed = |m: &Measure| 100.0 * m.zeroed as f64 / m.elements.max(1) as f64;
    let columns = ["shape", "relative error", "SQNR dB", "largest error", "zeroed"];
    let cells = |Finished { rows, cols, measure, .. }: &Finished| {
        [
            format!("{rows}×{cols}"),
            format!("{:.4}", measure.relative_error()),
            format!("{:.1}", measure.sqnr()),
            format!("{:.2e}", measure.largest),
            format!("{:.1} %", zeroed(measure)),
        ]
    };
    // On a narrow screen a row is a card whose cells say their column.
    html! {
        table class="cards" {
            tr { th { "weight" } @for column in columns { th { (column) } } }
            @for weight in order.into_iter().take(20) {
                tr {
                    td { (weight.module) }
                    @for (column, cell) in columns.into_iter().zip(cells(weight)) { td data-name=(column) { (cell) } }
                }
            }
        }
    }
}

/// What `--fix-scales` did, in a sentence.
pub fn fixed(summary: &Summary) -> String {
    if summary.rescaled.is_empty() {
        return "nothing: no joined NVFP4 weights differ in their tensor scale".to_string();
    }
    let (exact, changed): (Vec<&Finished>, Vec<&Finished>) =
        summary.rescaled.iter().partition(|w| w.measure.error == 0.0);
    let mut total = Measure::default();
    changed.iter().for_each(|w| total.add(&w.measure));
    let error = match changed.is_empty() {
        true => String::new(),
        false => format!(" (relerr {:.4} to the source)", total.relative_error()),
    };
    let count = summary.rescaled.len();
    format!(
        "{} got the tensor scale of what {} joined with: {} exactly, {} requantized{error}",
        counted(count, "weight"),
        if count == 1 { "it is" } else { "they are" },
        exact.len(),
        changed.len()
    )
}

fn rescaled(summary: &Summary) -> Markup {
    html! { p { (fixed(summary)) } (worst(&summary.rescaled)) }
}

fn codes(statistics: &Statistics) -> Markup {
    let magnitudes: Vec<(String, u64)> =
        (0..8).map(|m| (e2m1::MAGNITUDES[m].to_string(), statistics.codes[m] + statistics.codes[m + 8])).collect();
    html! {
        (bars("How often each magnitude occurs", &magnitudes))
        p class="soft" { (format!("Entropy {:.2} of 4 bits.", statistics.entropy())) }
    }
}

fn scales(statistics: &Statistics) -> Markup {
    let Some((least, most)) = statistics.scale_range() else { return html! {} };
    let bytes: Vec<(String, u64)> =
        (least..=most).map(|b| (e4m3::decode(b).to_string(), statistics.scales[usize::from(b)])).collect();
    html! {
        (bars("How often each block scale occurs", &bytes))
        p class="soft" { (format!("Bytes {least:#04x} to {most:#04x}.")) }
    }
}

fn kept(plan: &Plan<'_>) -> Markup {
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for item in &plan.items {
        if let Action::Keep(why) | Action::Decode(why) = &item.action {
            reasons.entry(why).or_default().push(&item.weight.module);
        }
    }
    for copied in &plan.copied {
        reasons.entry(&copied.reason).or_default().push(&copied.tensor.info.name);
    }
    reasons.values_mut().for_each(|names| names.sort_by(|a, b| order::natural(a, b)));
    let more = |names: &[&str]| match names.len() {
        ..=3 => String::new(),
        n => format!(" and {} more", n - 3),
    };
    html! {
        ul {
            @for (why, names) in &reasons {
                li { (why) ": " (names.iter().take(3).copied().collect::<Vec<_>>().join(", ")) (more(names)) }
            }
        }
        p class="soft" { "Tensors of one dimension (norms, biases) are copied too." }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_found_in_names() {
        assert_eq!(layer("model.layers.12.mlp.up_proj"), Some(12));
        assert_eq!(layer("encoder.layer.3.attention.query"), Some(3));
        assert_eq!(layer("pooler.dense"), None);
    }
}
