//! Sizes and counts as people write them.

/// `5GB`, `512MiB` or a plain number of bytes.
pub fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" => 1_000,
        "m" | "mb" => 1_000_000,
        "g" | "gb" => 1_000_000_000,
        "t" | "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return Err("expected a size like 5GB, 512MiB or 1000000".to_string()),
    };
    let bytes = digits.parse::<f64>().ok().map(|n| n * unit as f64).filter(|n| *n >= 1.0 && *n < 1e18);
    bytes.map(|n| n as u64).ok_or_else(|| "expected a positive size like 5GB, 512MiB or 1000000".to_string())
}

/// Three digits and a decimal unit.
pub fn show(bytes: u64) -> String {
    let (value, unit) = match bytes {
        0..1_000 => return format!("{bytes} B"),
        1_000..1_000_000 => (bytes as f64 / 1e3, "kB"),
        1_000_000..1_000_000_000 => (bytes as f64 / 1e6, "MB"),
        _ => (bytes as f64 / 1e9, "GB"),
    };
    match value {
        ..9.995 => format!("{value:.2} {unit}"),
        ..99.95 => format!("{value:.1} {unit}"),
        _ => format!("{value:.0} {unit}"),
    }
}

/// A count with its noun: `1 weight`, `2 weights`.
pub fn counted(n: usize, word: &str) -> String {
    if n == 1 { format!("1 {word}") } else { format!("{n} {word}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        assert_eq!(
            [parse("5TB"), parse("5GB"), parse("1.5k"), parse("2MiB"), parse("1TiB"), parse("7")],
            [Ok(5_000_000_000_000), Ok(5_000_000_000), Ok(1500), Ok(2 << 20), Ok(1 << 40), Ok(7)]
        );
        for wrong in ["", "GB", "-1", "5TB?", "0", "1e40", "nan", "5 GB"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!([show(999), show(1000), show(16_400_000_000)], ["999 B", "1.00 kB", "16.4 GB"]);
    }
}
