//! One of the parts that a conversion is made in, and which bytes of which files are its own.
//!
//! All that is written is known before the first weight is read, so every machine divides it in the
//! same way. Where there are at least as many files as parts, a part has whole files. Where there
//! are fewer, as with GGUF, a file is divided between its weights: each part writes a file of the
//! same length with its own bytes in their places, and these are copied into one at the end.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// The largest number of parts.
const MOST: usize = 100_000;

/// One of the parts of a conversion, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Portion {
    index: usize,
    of: usize,
}

impl Portion {
    /// Part `index` of `of`; none where there is no such part.
    pub fn new(index: usize, of: usize) -> Option<Self> {
        (index < of && of <= MOST).then_some(Portion { index, of })
    }

    /// All parts of so many.
    pub fn all(of: usize) -> impl Iterator<Item = Portion> {
        (0..of.min(MOST)).map(move |index| Portion { index, of })
    }

    /// Its number, from 0.
    pub fn index(self) -> usize {
        self.index
    }

    /// How many parts there are.
    pub fn of(self) -> usize {
        self.of
    }
}

/// `0/8` to `7/8`.
impl fmt::Display for Portion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.of)
    }
}

impl FromStr for Portion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        let Some((index, of)): Option<(usize, usize)> = numbers else {
            return Err("expected a part such as 0/8".to_string());
        };
        Portion::new(index, of).ok_or_else(|| match of {
            1..=MOST => format!("parts are counted from 0: expected 0/{of} to {}/{of}", of - 1),
            _ => format!("expected 1 to {MOST} parts"),
        })
    }
}

/// How much of a file a part has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    Whole,
    /// Some units, in a file of their own.
    Some,
}

/// What a part has of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slice {
    /// An index into the files.
    pub file: usize,
    pub units: Range<usize>,
    pub extent: Extent,
}

impl Slice {
    /// What it is called in the folder of the parts, if the whole file is called `file`.
    pub fn name(&self, file: &str, part: Portion) -> String {
        match self.extent {
            Extent::Whole => file.to_string(),
            Extent::Some => format!("{file}.{}-of-{}", part.index, part.of),
        }
    }
}

/// Divides files, given the costs of their units, into this many parts of about the same cost, in
/// order.
pub(super) fn divide(costs: &[Vec<u64>], parts: usize) -> Vec<Vec<Slice>> {
    if costs.len() >= parts {
        let whole = |file: usize| Slice { file, units: 0..costs[file].len(), extent: Extent::Whole };
        let files: Vec<u64> = costs.iter().map(|units| units.iter().sum()).collect();
        return runs(&files, parts).into_iter().map(|run| run.map(whole).collect()).collect();
    }
    let units: Vec<u64> = costs.iter().flatten().copied().collect();
    let slices = |run: Range<usize>| {
        let mut start = 0;
        let slice = |(file, costs): (usize, &Vec<u64>)| {
            let all = start..start + costs.len();
            start = all.end;
            let units = run.start.max(all.start)..run.end.min(all.end);
            let extent = if units == all { Extent::Whole } else { Extent::Some };
            let units = || units.start - all.start..units.end - all.start;
            (run.start.max(all.start) < run.end.min(all.end)).then(|| Slice { file, units: units(), extent })
        };
        costs.iter().enumerate().filter_map(slice).collect()
    };
    runs(&units, parts).into_iter().map(slices).collect()
}

/// Cuts a list into runs, each where the sum of the costs before it is nearest to its share. No run
/// is empty where there are enough to give each one.
fn runs(costs: &[u64], count: usize) -> Vec<Range<usize>> {
    let sums: Vec<u128> = std::iter::once(0)
        .chain(costs.iter().scan(0, |sum: &mut u128, &cost| {
            *sum += u128::from(cost);
            Some(*sum)
        }))
        .collect();
    let (len, total, enough) = (costs.len(), sums[costs.len()], costs.len() >= count);
    let mut start = 0;
    let run = |i: usize| {
        let share = total * (i as u128 + 1) / count as u128;
        let after = sums.partition_point(|&sum| sum < share).min(len);
        let before = after.saturating_sub(1);
        let nearest =
            if share - sums[before].min(share) < sums[after] - share.min(sums[after]) { before } else { after };
        let end = match (enough, i + 1 == count) {
            (_, true) => len,
            (true, false) => nearest.clamp(start + 1, len - (count - i - 1)),
            (false, false) => nearest.max(start),
        };
        let run = start..end;
        start = end;
        run
    };
    (0..count).map(run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_counted_from_0() {
        assert_eq!("3/8".parse(), Ok(Portion { index: 3, of: 8 }));
        for (text, expected) in [
            ("8/8", "expected 0/8 to 7/8"),
            ("0/0", "1 to 100000 parts"),
            ("0/100001", "1 to 100000 parts"),
            ("3", "such as 0/8"),
            ("-1/8", "such as 0/8"),
            ("a/b", "such as 0/8"),
        ] {
            let said = text.parse::<Portion>().unwrap_err();
            assert!(said.contains(expected), "{text}: {said}");
        }
    }

    #[test]
    fn every_unit_is_in_one_part_and_parts_are_about_as_large() {
        let files = |sizes: &[&[u64]]| sizes.iter().map(|units| units.to_vec()).collect::<Vec<_>>();
        let cases = [
            files(&[&[1; 40]]),
            files(&[&[5, 1, 1, 1], &[8], &[2, 2, 2, 2], &[4, 4]]),
            files(&[&[100, 1, 1, 1, 1, 1]]),
            files(&[&[0, 0], &[0]]),
            files(&[]),
        ];
        for costs in &cases {
            for parts in 1..9 {
                let divided = divide(costs, parts);
                assert_eq!(divided.len(), parts);
                let mut seen: Vec<Vec<usize>> = costs.iter().map(|units| vec![0; units.len()]).collect();
                for slice in divided.iter().flatten() {
                    assert!(!slice.units.is_empty());
                    slice.units.clone().for_each(|unit| seen[slice.file][unit] += 1);
                    let whole = slice.units.len() == costs[slice.file].len();
                    assert_eq!(whole, slice.extent == Extent::Whole, "{costs:?} in {parts}");
                }
                assert!(seen.iter().flatten().all(|&n| n == 1), "{costs:?} in {parts}: {divided:?}");
                if costs.len() >= parts {
                    assert!(divided.iter().all(|slices| !slices.is_empty()), "{costs:?} in {parts}");
                    assert!(divided.iter().flatten().all(|slice| slice.extent == Extent::Whole));
                }
            }
        }
        let even: Vec<usize> = divide(&cases[0], 8).iter().map(|slices| slices[0].units.len()).collect();
        assert_eq!(even, [5; 8]);
    }
}
