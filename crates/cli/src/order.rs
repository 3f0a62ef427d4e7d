//! Names in the order in which people count: `layers.2` before `layers.10`.

use std::cmp::Ordering;

/// Compares names, runs of digits by their number.
pub fn natural(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a, b);
    while !a.is_empty() && !b.is_empty() {
        let ((x, x_rest), (y, y_rest)) = (piece(a), piece(b));
        let order = match (digits(x), digits(y)) {
            // Without leading zeros, the longer number is the larger.
            (Some(x), Some(y)) => x.len().cmp(&y.len()).then_with(|| x.cmp(y)),
            _ => x.cmp(y),
        };
        if order != Ordering::Equal {
            return order;
        }
        (a, b) = (x_rest, y_rest);
    }
    a.len().cmp(&b.len())
}

/// The digits, or the characters that are not digits, at the front of a text; and the rest.
fn piece(text: &str) -> (&str, &str) {
    let number = text.starts_with(|c: char| c.is_ascii_digit());
    let end = text.find(|c: char| c.is_ascii_digit() != number).unwrap_or(text.len());
    text.split_at(end)
}

fn digits(piece: &str) -> Option<&str> {
    piece.starts_with(|c: char| c.is_ascii_digit()).then(|| piece.trim_start_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_counted() {
        let mut names = ["l.10.a", "l.9.b", "l.2", "l.2.a", "lm_head", "l.a", "", "l.010", "l.99999999999999999999.a"];
        names.sort_by(|a, b| natural(a, b));
        assert_eq!(
            names,
            ["", "l.2", "l.2.a", "l.9.b", "l.010", "l.10.a", "l.99999999999999999999.a", "l.a", "lm_head"]
        );
    }
}
