//! Lines that differ in one number alone, as one line with ranges: layers of a model, experts of a
//! layer.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

/// Folds lines that name tensors: first over experts, `weight[0-7]`, then over layers,
/// `layers.0-31.mlp`. A line stands where the first of its kind stood.
pub(super) fn fold(lines: impl Iterator<Item = String>) -> Vec<String> {
    by(by(lines, expert).into_iter(), layer)
}

/// Numbers as ranges: `0-3,5`.
pub(super) fn ranges(numbers: &[u64]) -> String {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for &n in numbers {
        match ranges.last_mut() {
            Some((_, end)) if end.checked_add(1) == Some(n) => *end = n,
            _ => ranges.push((n, n)),
        }
    }
    let text = |&(a, b): &(u64, u64)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    ranges.iter().map(text).collect::<Vec<_>>().join(",")
}

/// Stands for the number. No path and no spec has it.
const NUMBER: &str = "\0";

/// Folds lines that differ only in the number at this place, and where the same path stands again.
fn by(lines: impl Iterator<Item = String>, place: fn(&str) -> Option<Range<usize>>) -> Vec<String> {
    let mut folded: Vec<(String, Vec<u64>)> = Vec::new();
    let mut index = HashMap::new();
    for line in lines {
        let parse = |text: &str| text.parse::<u64>().ok().filter(|n| n.to_string() == text);
        let number = place(&line).and_then(|at| Some((at.clone(), parse(&line[at])?)));
        let Some((at, number)) = number else {
            folded.push((line, Vec::new()));
            continue;
        };
        // The path up to the number, with which the same layer may be named again in the line.
        let start = line[..at.start].rfind(' ').map_or(0, |space| space + 1);
        let again = &line[start..at.end];
        let shape = format!("{}{NUMBER}{}", &line[..at.start], &line[at.end..]);
        let shape = match again.contains(['.', '[']) {
            true => shape.replace(&format!(" {again}."), &format!(" {}{NUMBER}.", &line[start..at.start])),
            false => shape,
        };
        match index.entry(shape) {
            Entry::Occupied(found) => {
                let i: usize = *found.get();
                folded[i].1.push(number);
            }
            Entry::Vacant(vacant) => {
                folded.push((vacant.key().clone(), vec![number]));
                vacant.insert(folded.len() - 1);
            }
        }
    }
    folded.into_iter().map(|(shape, numbers)| shape.replace(NUMBER, &ranges(&numbers))).collect()
}

/// The number in `:weight[3]`, in the name of the line's tensor.
fn expert(line: &str) -> Option<Range<usize>> {
    let end = line.find(']')?;
    let start = line[..end].rfind('[')? + 1;
    let site = line[..start].trim_start_matches(['~', '+', '-', ' ']);
    (!site.contains(' ') && line[start..end].bytes().all(|b| b.is_ascii_digit())).then_some(start..end)
}

/// The first number among the names of the path that the line begins with.
fn layer(line: &str) -> Option<Range<usize>> {
    let start = line.len() - line.trim_start_matches(['~', '+', '-', ' ']).len();
    let path = line[start..].split([':', ' ']).next()?;
    let mut at = start;
    for (i, segment) in path.split('.').enumerate() {
        if i > 0 && !segment.is_empty() && segment.bytes().all(|b| b.is_ascii_digit()) {
            return Some(at..at + segment.len());
        }
        at += segment.len() + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_experts_share_lines() {
        let lines = [
            "~ l.0.fc:input: a → b",
            "~ l.0.moe:weight[0]: a → b",
            "~ l.0.moe:weight[1]: a → b",
            "~ l.1.fc:input: a → b",
            "~ l.1.moe:weight[0]: a → b",
            "~ l.1.moe:weight[1]: a → b",
            "~ l.3.fc:input: a → b",
            "~ l.4.fc:input: a → c",
            "l.0.a:o → l.0.b:input: x",
            "l.1.a:o → l.1.b:input: x",
            "l.2.a:o → l.9.b:input: x",
            "line 3: y",
            "line 4: y",
            "head fprop: input[0].row is x",
        ];
        assert_eq!(
            fold(lines.map(String::from).into_iter()),
            [
                "~ l.0-1,3.fc:input: a → b",
                "~ l.0-1.moe:weight[0-1]: a → b",
                "~ l.4.fc:input: a → c",
                "l.0-1.a:o → l.0-1.b:input: x",
                "l.2.a:o → l.9.b:input: x",
                "line 3: y",
                "line 4: y",
                "head fprop: input[0].row is x",
            ]
        );
    }

    #[test]
    fn numbers_as_ranges() {
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[0, 1, 2, 4, 7, 8]), "0-2,4,7-8");
        assert_eq!(ranges(&[u64::MAX, 0]), "18446744073709551615,0");
    }
}
