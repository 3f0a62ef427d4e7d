//! Where a module stands in a model, and patterns over such places.

use nvfp4::format::is_name;
use std::fmt;
use std::sync::Arc;

/// A module's place in a model: segments joined by dots, as in `layers.3.mlp.fc2`.
///
/// Any text can be written down; [`Plan::build`](super::Plan::build) refuses a path that is empty,
/// has an empty segment or a character other than letters, digits, `_` and `-`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModulePath(Arc<str>);

impl ModulePath {
    /// The path of a module inside this one.
    pub fn child(&self, name: &str) -> Self {
        ModulePath(if self.0.is_empty() { name.into() } else { format!("{}.{name}", self.0).into() })
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The names between the dots.
    pub fn segments(&self) -> impl Iterator<Item = &str> {
        self.0.split('.')
    }

    pub(super) fn is_valid(&self) -> bool {
        self.segments().all(is_name)
    }
}

impl From<&str> for ModulePath {
    fn from(text: &str) -> Self {
        ModulePath(text.into())
    }
}

impl From<String> for ModulePath {
    fn from(text: String) -> Self {
        ModulePath(text.into())
    }
}

impl From<&ModulePath> for ModulePath {
    fn from(path: &ModulePath) -> Self {
        path.clone()
    }
}

impl fmt::Display for ModulePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A pattern over module paths. `*` stands for any text within a segment, `?` for one character,
/// and the segment `**` for any number of segments, none too.
///
/// ```
/// use nvfp4_recipe::Glob;
///
/// let glob = Glob::new("layers.*.mlp.**");
/// assert!(glob.matches(&"layers.3.mlp".into()) && glob.matches(&"layers.3.mlp.fc1".into()));
/// assert!(!glob.matches(&"layers.3.attention".into()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Glob(Arc<str>);

impl Glob {
    /// A pattern.
    pub fn new(pattern: &str) -> Self {
        Glob(pattern.into())
    }

    /// Whether there are paths that fit.
    pub(super) fn is_valid(&self) -> bool {
        self.0.split('.').all(|segment| is_name(&segment.replace(['*', '?'], "x")))
    }

    /// Whether the whole path fits the pattern.
    pub fn matches(&self, path: &ModulePath) -> bool {
        let pattern: Vec<&str> = self.0.split('.').collect();
        let path: Vec<&str> = path.segments().collect();
        sequence(
            &pattern,
            &path,
            |p| *p == "**",
            |p, s| {
                let (p, s): (Vec<char>, Vec<char>) = (p.chars().collect(), s.chars().collect());
                sequence(&p, &s, |c| *c == '*', |p, c| *p == '?' || p == c)
            },
        )
    }
}

impl fmt::Display for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether items fit a pattern in which some stand for any number of items. Remembers the last such
/// place only, which is enough (a later one can always take up what an earlier one would), so the
/// time is at most pattern times items.
fn sequence<P, T>(pattern: &[P], items: &[T], any: impl Fn(&P) -> bool, one: impl Fn(&P, &T) -> bool) -> bool {
    let (mut p, mut i, mut retry) = (0, 0, None);
    while i < items.len() {
        if p < pattern.len() && any(&pattern[p]) {
            retry = Some((p, i));
            p += 1;
        } else if p < pattern.len() && one(&pattern[p], &items[i]) {
            (p, i) = (p + 1, i + 1);
        } else if let Some((star, from)) = retry {
            (p, i) = (star + 1, from + 1);
            retry = Some((star, from + 1));
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(any)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, path, fits) in [
            ("**", "a", true),
            ("**", "a.b.c", true),
            ("a", "a", true),
            ("a", "a.b", false),
            ("*", "a.b", false),
            ("*.b", "a.b", true),
            ("a.**.z", "a.z", true),
            ("a.**.z", "a.b.c.z", true),
            ("a.**.z", "a.b.c", false),
            ("**.fc?", "x.fc1", true),
            ("**.fc?", "x.fc10", false),
            ("**.fc*", "x.fc10", true),
            ("layers.1*.m", "layers.12.m", true),
            ("layers.1*.m", "layers.2.m", false),
            ("**.b.**", "a.b", true),
            ("**.b.**", "b", true),
            ("a*c*e", "abcde", true),
            ("a*c*e", "abcd", false),
            ("", "a", false),
        ] {
            assert_eq!(Glob::new(pattern).matches(&path.into()), fits, "{pattern} {path}");
        }
    }

    #[test]
    fn many_stars_take_no_time() {
        let pattern = "a*".repeat(200) + "b";
        assert!(!Glob::new(&pattern).matches(&"a".repeat(5000).into()));
    }

    #[test]
    fn valid_paths() {
        for (path, valid) in
            [("a", true), ("a.b-c.d_0", true), ("größe.0", true), ("", false), ("a..b", false), (".a", false)]
        {
            assert_eq!(ModulePath::from(path).is_valid(), valid, "{path:?}");
        }
        for path in ["a b", "a:b", "a[0]", "a.*", "a/b"] {
            assert!(!ModulePath::from(path).is_valid(), "{path:?}");
        }
        assert_eq!(ModulePath::from("").child("a").child("b").as_str(), "a.b");
    }
}
