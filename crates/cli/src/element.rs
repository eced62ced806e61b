//! Dispatch from an element type to the Rust type.

/// Evaluates an expression with a type name bound to the type of an `ElementType` value; compiled
/// once per type.
macro_rules! with_element {
    ($element:expr, $name:ident => $work:expr) => {
        match $element {
            longspan::ElementType::F32 => {
                type $name = f32;
                $work
            }
            longspan::ElementType::Bf16 => {
                type $name = half::bf16;
                $work
            }
            longspan::ElementType::F16 => {
                type $name = half::f16;
                $work
            }
            other => unreachable!("{other} has come to the library, and not to this command"),
        }
    };
}

pub(crate) use with_element;
