//! `convert --report`: one page that says what a conversion did to the weights.

use crate::order;
use crate::page::{self, Chart, Line, Marks, Point, escape};
use crate::sizes;
use crate::sizes::counted;
use anyhow::Result;
use nvfp4_checkpoint::{Action, Finished, Measure, Plan, Statistics, Summary};
use nvfp4_spec::e2m1;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// Writes the page.
pub fn write(path: &Path, title: &str, plan: &Plan<'_>, summary: &Summary, statistics: &Statistics) -> Result<()> {
    page::write(path, &page(title, plan, summary, statistics))
}

fn page(title: &str, plan: &Plan<'_>, summary: &Summary, statistics: &Statistics) -> String {
    let mut sections = Vec::new();
    if !summary.quantized.is_empty() {
        sections.push(("Error per layer and projection", layers(&summary.quantized)));
        sections.push(("Worst weights", worst(&summary.quantized)));
    }
    if !summary.rescaled.is_empty() {
        sections.push(("Joined weights with different tensor scales", rescaled(summary)));
    }
    sections.push(("Codes", codes(statistics)));
    sections.push(("Block scales", scales(statistics)));
    sections.push(("Kept as they were", kept(plan)));
    page::page(&format!("{title} in NVFP4"), &introduction(summary), &sections)
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
         SQNR {sqnr:.1} dB; NVFP4 of normal data has 0.095.",
        counted(count, "weight")
    )
}

/// The number after `layers.` (or `layer.`, `h.`, `blocks.`) in a module's name.
fn layer(module: &str) -> Option<usize> {
    let mut parts = module.split('.');
    parts.by_ref().find(|p| ["layers", "layer", "h", "blocks"].contains(p))?;
    parts.next()?.parse().ok()
}

/// A line per projection over the layers. Experts of a layer are measured together.
fn layers(weights: &[Finished]) -> String {
    let mut lines: BTreeMap<&str, BTreeMap<usize, Measure>> = BTreeMap::new();
    for weight in weights {
        if let Some(layer) = layer(&weight.module) {
            let projection = weight.module.rsplit('.').next().unwrap_or_default();
            lines.entry(projection).or_default().entry(layer).or_default().add(&weight.measure);
        }
    }
    if lines.is_empty() {
        return "<p class=\"soft\">No weight has the number of a layer in its name.</p>".to_string();
    }
    let line = |(projection, errors): (&str, BTreeMap<usize, Measure>)| Line {
        name: projection.to_string(),
        points: errors.iter().map(|(&layer, measure)| Point::new(layer as f64, measure.relative_error())).collect(),
    };
    let lines = lines.into_iter().map(line).collect();
    Chart { label: "Relative error by layer", x: "layer", digits: 4, marks: Marks::Circles, lines }.svg()
}

fn worst(weights: &[Finished]) -> String {
    let mut order: Vec<&Finished> = weights.iter().collect();
    order.sort_by(|a, b| b.measure.relative_error().total_cmp(&a.measure.relative_error()));
    let mut html = String::from(
        "<table><tr><th>weight</th><th>shape</th><th>relative error</th><th>SQNR dB</th><th>largest error</th><th>zeroed</th></tr>",
    );
    for w in order.iter().take(20) {
        let m = &w.measure;
        let zeroed = 100.0 * m.zeroed as f64 / m.elements.max(1) as f64;
        let _ = write!(
            html,
            "<tr><td>{}</td><td>{}×{}</td><td>{:.4}</td><td>{:.1}</td><td>{:.2e}</td><td>{zeroed:.1} %</td></tr>",
            escape(&w.module),
            w.rows,
            w.cols,
            m.relative_error(),
            m.sqnr(),
            m.largest
        );
    }
    html + "</table>"
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

fn rescaled(summary: &Summary) -> String {
    format!("<p>{}</p>{}", escape(&fixed(summary)), worst(&summary.rescaled))
}

fn codes(statistics: &Statistics) -> String {
    let magnitudes: Vec<(String, u64)> =
        (0..8).map(|m| (e2m1::MAGNITUDES[m].to_string(), statistics.codes[m] + statistics.codes[m + 8])).collect();
    let entropy = statistics.entropy();
    bars("How often each magnitude occurs", &magnitudes)
        + &format!("<p class=\"soft\">Entropy {entropy:.2} of 4 bits.</p>")
}

fn scales(statistics: &Statistics) -> String {
    let Some((least, most)) = statistics.scale_range() else { return String::new() };
    let bytes: Vec<(String, u64)> =
        (least..=most).map(|b| (format!("{b:#04x}"), statistics.scales[usize::from(b)])).collect();
    bars("How often each scale byte occurs", &bytes)
}

/// A bar for each count; labels where there is room.
fn bars(what: &str, counts: &[(String, u64)]) -> String {
    let most = counts.iter().map(|(_, n)| *n).max().unwrap_or(1).max(1);
    let total = counts.iter().map(|(_, n)| *n).sum::<u64>().max(1);
    let width = 740.0 / counts.len().max(1) as f64;
    let every = counts.len().div_ceil(12);
    let mut svg = format!("<svg viewBox=\"0 0 800 200\" role=\"img\" aria-label=\"{what}\">");
    for (i, (label, n)) in counts.iter().enumerate() {
        let (x, height) = (30.0 + width * i as f64, 150.0 * *n as f64 / most as f64);
        let share = 100.0 * *n as f64 / total as f64;
        let _ = write!(
            svg,
            "<rect class=\"bar\" x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{height:.1}\"><title>{label}: {share:.2} %</title></rect>",
            x + width * 0.05,
            170.0 - height,
            width * 0.9
        );
        if i % every == 0 {
            let _ = write!(svg, "<text x=\"{:.1}\" y=\"188\" text-anchor=\"middle\">{label}</text>", x + width / 2.0);
        }
    }
    svg + "</svg>"
}

fn kept(plan: &Plan<'_>) -> String {
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
    let line = |(why, modules): (&&str, &Vec<&str>)| {
        let shown: Vec<String> = modules.iter().take(3).map(|m| escape(m)).collect();
        let more = if modules.len() > 3 { format!(" and {} more", modules.len() - 3) } else { String::new() };
        format!("<li>{}: {}{more}</li>", escape(why), shown.join(", "))
    };
    let list: String = reasons.iter().map(line).collect();
    format!("<ul>{list}</ul><p class=\"soft\">Tensors of one dimension (norms, biases) are copied too.</p>")
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

    #[test]
    fn text_from_a_checkpoint_cannot_become_markup() {
        assert_eq!(escape("<script>\"&"), "&lt;script&gt;&quot;&amp;");
    }
}
