//! Names that strangers chose, as a terminal may show them. Every command that prints a name of a
//! tensor, module or file goes through here.

use std::borrow::Cow;

/// The widest column of names. Longer names stand over the next column.
const WIDEST: usize = 120;

/// A text in which a terminal finds nothing to act on: control characters, and marks that change
/// the direction of writing, are shown as `\u{1b}`.
pub fn shown(text: &str) -> Cow<'_, str> {
    escaped(text, acts)
}

/// The same for a text of several lines, which may have tabs.
pub fn shown_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| acts(c) && !matches!(c, '\n' | '\t'))
}

/// The width of a column of these names as they are shown, with a heading of `least` characters.
pub fn width<'a>(names: impl Iterator<Item = &'a str>, least: usize) -> usize {
    names.map(|name| shown(name).chars().count()).max().unwrap_or(0).clamp(least, WIDEST.max(least))
}

/// A name in a column. The widths of `format!` end at 65,535 characters, and a name may have more.
pub fn padded(name: &str, width: usize) -> String {
    let name = shown(name);
    let missing = width.saturating_sub(name.chars().count());
    format!("{name}{}", " ".repeat(missing))
}

/// Whether a terminal would act on a character.
pub fn acts(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
}

fn escaped(text: &str, acts: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&acts) {
        return Cow::Borrowed(text);
    }
    let mut out = String::new();
    for c in text.chars() {
        match acts(c) {
            true => out.extend(c.escape_unicode()),
            false => out.push(c),
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_acts_on_is_shown_as_its_number() {
        assert_eq!(shown("model.layers.0 – ä"), "model.layers.0 – ä");
        assert_eq!(shown("a\u{1b}[31mb\n\u{202e}\u{9b}\u{7f}"), r"a\u{1b}[31mb\u{a}\u{202e}\u{9b}\u{7f}");
        assert_eq!(shown_lines("a\n\rb"), "a\n\\u{d}b");
    }

    #[test]
    fn columns_are_as_wide_as_their_names_up_to_a_limit() {
        assert_eq!(width(["ab", "abcdef", "\u{1b}"].into_iter(), 4), 6);
        assert_eq!(width(std::iter::empty(), 4), 4);
        let long = "a".repeat(100_000);
        assert_eq!(width([long.as_str()].into_iter(), 4), WIDEST);
        assert_eq!(padded(&long, WIDEST), long);
        assert_eq!(padded("ä\u{1b}", 9), r"ä\u{1b}  ");
    }
}
