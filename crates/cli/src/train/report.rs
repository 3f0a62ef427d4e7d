//! `train --report`: one page with the curves of each recipe, their spread over the seeds, and the
//! gap to the baseline.

use super::results::{self, Results, Row, RunResult, Spread};
use crate::chart::{Chart, Line, Marks, Point};
use crate::page;
use crate::recipes::BASELINE;
use anyhow::Result;
use maud::{Markup, html};
use std::collections::BTreeMap;
use std::path::Path;

/// Writes the page.
pub fn write(path: &Path, results: &Results) -> Result<()> {
    page::write(path, &page(results))
}

fn page(results: &Results) -> String {
    let seeds = results.recipes().into_iter().map(|recipe| results.of(recipe).count()).max().unwrap_or(0);
    let spread = if seeds > 1 {
        format!(" Lines are means over {seeds} seeds, bands go from the smallest to the largest.")
    } else {
        String::new()
    };
    let introduction = format!(
        "{}. Text: {}. Losses are in nats per token.{spread}",
        results.settings.describe(),
        results.settings.text
    );
    let sections = [
        ("Result", html! { (table(&results.rows())) (errors(results)) }),
        ("Held-out loss", chart(results, "Held-out loss by step", 3, Marks::Circles, |run| points(&run.held_out))),
        ("Gap to bf16 in %", gaps(results)),
        ("Training loss", chart(results, "Training loss by step", 3, Marks::None, |run| points(&run.train))),
    ];
    page::page("Training side by side", &introduction, &sections)
}

fn points(points: &[results::Point]) -> BTreeMap<u64, f64> {
    points.iter().map(|point| (point.step, f64::from(point.loss))).collect()
}

/// A line per recipe: at each step the mean of its runs.
fn chart(
    results: &Results,
    label: &str,
    digits: usize,
    marks: Marks,
    curve: impl Fn(&RunResult) -> BTreeMap<u64, f64>,
) -> Markup {
    let line = |recipe: &str| {
        let mut values: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
        for run in results.of(recipe) {
            curve(run).into_iter().for_each(|(step, value)| values.entry(step).or_default().push(value));
        }
        let point = |(step, values): (u64, Vec<f64>)| {
            let Spread { mean, min, max } = Spread::of(&values)?;
            Some(Point { x: step as f64, y: mean, low: min, high: max })
        };
        Line { name: recipe.to_string(), points: values.into_iter().filter_map(point).collect() }
    };
    let lines: Vec<Line> = results.recipes().into_iter().map(line).filter(|line| !line.points.is_empty()).collect();
    match lines.is_empty() {
        true => html! { p class="soft" { "Nothing to show." } },
        false => Chart { label, x: "step", digits, marks, reference: None, lines }.svg(),
    }
}

/// How far the held-out loss is above the baseline's from the same seed.
fn gaps(results: &Results) -> Markup {
    let baselines: BTreeMap<u64, BTreeMap<u64, f64>> =
        results.of(BASELINE).map(|run| (run.seed, points(&run.held_out))).collect();
    if baselines.is_empty() {
        return html! { p class="soft" { "There is no run with the recipe " (BASELINE) "." } };
    }
    chart(results, "Gap to bf16 by step", 2, Marks::Circles, |run| {
        let baseline = baselines.get(&run.seed);
        let gap = |(step, loss): (u64, f64)| Some((step, 100.0 * (loss / baseline?.get(&step)? - 1.0)));
        points(&run.held_out).into_iter().filter_map(gap).collect()
    })
}

fn table(rows: &[Row]) -> Markup {
    let gaps = |gap: &Option<Spread>| match gap {
        None => ["–".to_string(), "–".to_string()],
        Some(Spread { mean, min, max }) => [format!("{mean:+.2} %"), format!("{min:+.2} to {max:+.2} %")],
    };
    html! {
        table {
            tr {
                th { "recipe" } th { "seeds" } th { "held-out loss" } th { "smallest–largest" }
                th { "gap to " (BASELINE) } th { "smallest–largest" } th { "tokens/s" }
            }
            @for Row { recipe, seeds, held_out: Spread { mean, min, max }, gap_percent, tokens_per_second } in rows {
                tr {
                    td { (recipe) }
                    td { (seeds) }
                    td { (format!("{mean:.4}")) }
                    td { (format!("{min:.4}–{max:.4}")) }
                    @for gap in gaps(gap_percent) { td { (gap) } }
                    td { (format!("{tokens_per_second:.0}")) }
                }
            }
        }
    }
}

/// Runs that did not finish.
fn errors(results: &Results) -> Markup {
    let failed: Vec<(&RunResult, &String)> =
        results.runs.iter().filter_map(|run| Some((run, run.error.as_ref()?))).collect();
    html! {
        @if !failed.is_empty() {
            p { "Ended by an error:" }
            ul { @for (run, error) in failed { li { (run.recipe) ", seed " (run.seed) ": " (error) } } }
        }
    }
}
