//! From the name of an element type to the type.

/// An expression in which a name stands for the element type that a value names: it is compiled
/// once a type.
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
