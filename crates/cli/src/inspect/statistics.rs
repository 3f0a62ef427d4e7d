//! Statistics of scales and codes, as `nvfp4 inspect` shows them.

use anyhow::Result;
use nvfp4_checkpoint::Statistics;
use nvfp4_spec::e2m1;
use std::collections::BTreeMap;
use std::io::Write;

/// Scales, tensor scales and codes, a line each.
pub fn print_statistics(out: &mut impl Write, total: &Statistics, globals: Option<(f32, f32)>) -> Result<()> {
    let [zero, nan, negative] = [total.scales[0], total.nan_scales(), total.negative_scales()];
    let range = total.scale_range().map_or("none".to_string(), |(a, b)| format!("{a:#04x} to {b:#04x}"));
    writeln!(out, "scales   {range}, zero {zero}, NaN {nan}, negative {negative}")?;
    if let Some((least, most)) = globals {
        writeln!(out, "global   {least:.4e} to {most:.4e}")?;
    }
    let count = total.codes.iter().sum::<u64>().max(1);
    let share = |m: usize| 100.0 * (total.codes[m] + total.codes[m + 8]) as f64 / count as f64;
    let codes: Vec<String> = (0..8).map(|m| format!("{} {:.1}%", e2m1::MAGNITUDES[m], share(m))).collect();
    Ok(writeln!(out, "codes    {}  entropy {:.2} bits", codes.join("  "), total.entropy())?)
}

/// Scale bytes that occur, and how often.
pub fn scale_bytes(total: &Statistics) -> BTreeMap<String, u64> {
    let counts = total.scales.iter().enumerate().filter(|(_, n)| **n > 0);
    counts.map(|(byte, n)| (byte.to_string(), *n)).collect()
}
