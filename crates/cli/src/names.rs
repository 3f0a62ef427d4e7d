//! Names that strangers chose, as a terminal may show them. Every command that prints a name of a
//! tensor, module or file goes through here.

use std::borrow::Cow;

/// A text in which a terminal finds nothing to act on: control characters, and marks that change
/// the direction of writing, are shown as `\u{1b}`.
pub fn shown(text: &str) -> Cow<'_, str> {
    escaped(text, acts)
}

/// The same for a text of several lines, which may have tabs.
pub fn shown_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| acts(c) && !matches!(c, '\n' | '\t'))
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
}
