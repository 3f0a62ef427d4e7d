//! `eval --report`: one page that says what quantization cost.

use super::Found;
use crate::chart::{Chart, Line, Marks, Point, bars};
use crate::page;
use crate::sizes::counted;
use anyhow::Result;
use maud::{Markup, html};
use nvfp4_model::{Lane, perplexity};
use std::path::Path;

/// Writes the page.
pub fn write(path: &Path, title: &str, found: &Found) -> Result<()> {
    let introduction = found.verdict().unwrap_or_else(|| format!("One model, {}.", counted(found.tokens, "token")));
    let mut sections = vec![("Perplexity", perplexities(found))];
    if let Some((_, divergence, _)) = found.costs().into_iter().find(|(lane, ..)| *lane == Lane::Served) {
        let shares = divergence.percentiles.iter().map(|(share, kl)| [format!("{share} %"), format!("{kl:.6}")]);
        sections.push(("KL divergence that a share of positions stays below", table(["share", "divergence"], shares)));
        let bands =
            divergence.by_confidence.iter().map(|(from, to, n, _)| (format!("{from:.1} to {to:.1}"), *n as u64));
        sections.push((
            "Positions by the reference's confidence",
            bars("Positions by confidence", &bands.collect::<Vec<_>>()),
        ));
        let costs = found.costs();
        let costs =
            costs.iter().map(|(lane, kl, _)| [format!("{lane:?}").to_lowercase(), format!("{:.6}", kl.mean.mean)]);
        sections.push(("What costs what", table(["run", "KL divergence"], costs)));
        sections.push(("Drift of the hidden state", drift(found)));
    }
    page::write(path, &page::page(&format!("{title}, evaluated"), &introduction, &sections))
}

fn table(heads: [&str; 2], rows: impl Iterator<Item = [String; 2]>) -> Markup {
    html! {
        table {
            tr { @for head in heads { th { (head) } } }
            @for row in rows { tr { @for cell in row { td { (cell) } } } }
        }
    }
}

fn perplexities(found: &Found) -> Markup {
    let rows = found.evaluation.said.iter().map(|(lane, said)| {
        let own = perplexity(said);
        [format!("{lane:?}").to_lowercase(), format!("{:.5} ± {:.5}", own.mean, own.error)]
    });
    table(["run", "perplexity"], rows)
}

fn drift(found: &Found) -> Markup {
    let point = |(i, drift): (usize, &nvfp4_model::Drift)| {
        let y = drift.relative_error();
        Point { x: i as f64, y, low: y, high: y }
    };
    let points = found.evaluation.drift.iter().enumerate().map(point).collect();
    let lines = vec![Line { name: "relative error".to_string(), points }];
    Chart {
        label: "Relative error of the hidden state by layer",
        x: "layer",
        digits: 4,
        marks: Marks::Circles,
        reference: None,
        lines,
    }
    .svg()
}
