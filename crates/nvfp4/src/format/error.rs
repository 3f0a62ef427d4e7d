//! What is wrong with a format.

/// The result of describing a format.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A format or a spec that has no meaning.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A combination that the rules refuse.
    #[error(transparent)]
    Rule(#[from] nvfp4_spec::Error),

    /// The Hadamard transform without the direction that it acts on.
    #[error(
        "the Hadamard transform acts on the column direction, which is not asked for; \
         use `Directions::Column` or `Directions::Both`, or `Transform::None`"
    )]
    TransformWithoutColumn,

    /// A setting that has no meaning; the text names the fix.
    #[error("{0}")]
    Setting(String),
}
