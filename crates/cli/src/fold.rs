//! Lines of a plan that are alike, as one: the same layer after layer, expert after expert.

use std::collections::{BTreeMap, BTreeSet};

/// A line about a weight, or about a tensor that looks like one.
pub struct Row<'p> {
    pub name: &'p str,
    pub shape: Vec<usize>,
    pub format: String,
    pub action: &'static str,
    pub group: Option<usize>,
    pub why: &'p str,
    pub bytes: u64,
    pub new_bytes: u64,
}

/// Rows that share a line.
pub struct Fold<'r, 'p> {
    /// Their name, with `{0..47}` for numbers in which they differ.
    pub name: String,
    /// The rows, at least one.
    pub rows: Vec<&'r Row<'p>>,
}

/// A line for each row.
pub fn each<'r, 'p>(rows: &'r [Row<'p>]) -> Vec<Fold<'r, 'p>> {
    rows.iter().map(|row| Fold { name: row.name.to_string(), rows: vec![row] }).collect()
}

/// A line for rows that differ in nothing but numbers in their names. `kind` is what a row shares a
/// scale in.
pub fn fold<'r, 'p, 'k>(rows: &'r [Row<'p>], kind: impl Fn(&Row<'p>) -> Option<&'k str>) -> Vec<Fold<'r, 'p>> {
    let mut folds: Vec<Vec<&'r Row<'p>>> = Vec::new();
    let mut found = BTreeMap::new();
    for row in rows {
        let name: Vec<&str> = row.name.split('.').map(|part| if is_number(part) { "#" } else { part }).collect();
        let key = (name, &row.shape, &row.format, row.action, kind(row), row.why);
        let at = *found.entry(key).or_insert(folds.len());
        if at == folds.len() {
            folds.push(Vec::new());
        }
        folds[at].push(row);
    }
    folds.into_iter().map(|rows| Fold { name: named(&rows), rows }).collect()
}

fn is_number(part: &str) -> bool {
    !part.is_empty() && part.len() < 10 && part.bytes().all(|b| b.is_ascii_digit())
}

/// The name of rows whose names differ in numbers.
fn named(rows: &[&Row<'_>]) -> String {
    let mut parts: Vec<String> = rows[0].name.split('.').map(String::from).collect();
    for (i, part) in parts.iter_mut().enumerate().filter(|(_, part)| is_number(part)) {
        let number = |row: &&Row<'_>| row.name.split('.').nth(i).and_then(|part| part.parse().ok());
        let numbers: BTreeSet<u32> = rows.iter().filter_map(number).collect();
        if numbers.len() > 1 {
            *part = format!("{{{}}}", ranges(&numbers));
        }
    }
    parts.join(".")
}

/// `0..2,5,7..9`; the end of a long list is left out.
fn ranges(numbers: &BTreeSet<u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == number => *end = number,
            _ => runs.push((number, number)),
        }
    }
    /// Runs that are listed.
    const MOST: usize = 6;
    let text = |(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}..{last}"),
    };
    let listed: Vec<String> = runs.iter().take(MOST).map(text).collect();
    format!("{}{}", listed.join(","), if runs.len() > MOST { ",…" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_differ_in_numbers_share_a_line() {
        let row = |name: &'static str, why: &'static str| Row {
            name,
            shape: vec![2, 2],
            format: "BF16".to_string(),
            action: "nvfp4",
            group: None,
            why,
            bytes: 8,
            new_bytes: 4,
        };
        let rows = [
            row("l.0.e.0.up", ""),
            row("l.0.e.1.up", ""),
            row("l.2.e.0.up", ""),
            row("l.2.e.1.up", "x"),
            row("head", ""),
        ];
        let names: Vec<(String, usize)> = fold(&rows, |_| None).into_iter().map(|f| (f.name, f.rows.len())).collect();
        let expected = [("l.{0,2}.e.{0..1}.up", 3), ("l.2.e.1.up", 1), ("head", 1)];
        assert_eq!(names, expected.map(|(name, count)| (name.to_string(), count)));
        assert_eq!(each(&rows).len(), 5);
    }

    #[test]
    fn numbers_are_written_as_ranges() {
        assert_eq!(ranges(&BTreeSet::from([3, 4, 5, 9])), "3..5,9");
        assert_eq!(ranges(&(0..40).step_by(2).collect()), "0,2,4,6,8,10,…");
    }
}
